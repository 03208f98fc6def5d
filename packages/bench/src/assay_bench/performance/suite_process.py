"""A pytest process that runs one round of a suite per turn."""

import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from assay.files import read_json_object
from assay.runs import ProcessError
from assay.runs.processes.answering import SAME_HASHES
from assay.runs.processes.groups import end_command
from assay.watchdog import watched
from assay_bench.performance.environments import Environment
from assay_bench.performance.requests import REQUEST_VARIABLE, SuiteEvent, SuiteRequest
from assay_bench.performance.results import SuiteResult
from assay_bench.performance.suite_table import SpeedSuite

# Enough for one round, and for loading and compiling a model before the first.
_ROUND_SECONDS = 1800.0


class SuiteProcess:
    """A running suite process. `suite_process` makes it."""

    def __init__(
        self, environment: Environment, folder: Path, process: subprocess.Popen[bytes],
        go: int, events: int,
    ) -> None:  # fmt: skip
        self.skipped: dict[str, str] = {}
        """Reasons of suites that cannot run there."""
        self.waiting_for: str | None = None
        """The suite of the next round; None after the last suite."""
        self._environment, self._folder, self._process = environment, folder, process
        self._go, self._events, self._unread = go, events, b""

    def wait_until_ready(self) -> None:
        """Wait until the process can run a round or has ended.

        Raises: UsageError or MachineError that the process reports; MachineError if it writes nothing
            for half an hour.
        """
        self.waiting_for = None
        while line := self._read_line():
            event = self._read_event(line)
            if event.kind == "ready":
                self.waiting_for = event.suite
                return
            if event.kind != "skipped":
                raise (UsageError if event.kind == "usage" else MachineError)(event.reason)
            self.skipped[event.suite] = event.reason

    def give_turn(self) -> None:
        """Let the process run a round, or begin the next suite. Returns at once."""
        with suppress(BrokenPipeError):  # the process ended, which `results` reports
            os.write(self._go, b"g")

    def run_round(self) -> None:
        """Let the process run a round, and wait for its end."""
        self.give_turn()
        self.wait_until_ready()

    def results(self) -> tuple[list[SuiteResult], dict[str, Any]]:
        """Return the samples of all suites, and the device. Call it when `waiting_for` is None.

        Raises: ProcessError with the end of the log if the process failed.
        """
        code = self._process.wait()
        file = self._folder / "benchmark.json"
        if not code and self.skipped and not file.is_file():
            return [], {}
        if code or not file.is_file():
            raise ProcessError.died("suite", code, self._folder / "suites.log")
        benchmarks = read_json_object(file)["benchmarks"]
        device: dict[str, Any] = {}
        found = []
        for benchmark in benchmarks:
            measured = dict(benchmark["extra_info"])
            device = measured.pop("device")
            try:
                found.append(SuiteResult(seconds=benchmark["stats"]["data"], **measured))
            except ValidationError as error:
                raise self._of_another_version(error) from None
        return found, device

    def _read_event(self, line: bytes) -> SuiteEvent:
        try:
            return SuiteEvent.model_validate_json(line)
        except ValidationError as error:
            raise self._of_another_version(error) from None

    def _of_another_version(self, error: ValidationError) -> MachineError:
        first = error.errors()[0]
        return MachineError(
            f"{self._environment.name} has suites of another version: {first['loc'][-1]}: {first['msg']}"
        )

    def _read_line(self) -> bytes:
        """Read the next event, without its newline; empty after the last."""
        while b"\n" not in self._unread:
            if not select.select([self._events], [], [], _ROUND_SECONDS)[0]:
                raise MachineError(
                    f"the suites of {self._environment.name} wrote nothing for"
                    f" {_ROUND_SECONDS:.0f} s; log: {self._folder / 'suites.log'}"
                )
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                return b""
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line


@contextmanager
def suite_process(
    environment: Environment, suites: Sequence[SpeedSuite], request: SuiteRequest, folder: Path
) -> Iterator[SuiteProcess]:
    """Start pytest on `suites` in `environment`. The context ends it and its children.

    folder: an existing folder for the log and the output of pytest-benchmark.
    """
    nodes = environment.nodes_of(suites)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # hides the user's
    child_go, go = os.pipe()
    events, child_events = os.pipe()
    child_request = request.model_copy(update={"go": child_go, "events": child_events})
    # Drop plugins and options of the user and of a parent pytest: with the variables of pytest-xdist,
    # pytest-benchmark measures nothing.
    variables = {k: v for k, v in environment.variables.items() if not k.startswith("PYTEST_")}
    variables |= {**SAME_HASHES, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables[REQUEST_VARIABLE] = child_request.model_dump_json()
    with (folder / "suites.log").open("wb") as log:
        process = subprocess.Popen(
            [
                environment.python, "-P", "-m", "pytest", *nodes, "--quiet",
                f"--rootdir={folder}", f"--config-file={folder / 'pytest.ini'}",
                "--import-mode=importlib", "--assert=plain", "-p", "no:cacheprovider",
                "-p", "pytest_benchmark.plugin",
                f"--benchmark-json={folder / 'benchmark.json'}", "--benchmark-disable-gc",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables,
            pass_fds=(child_go, child_events), process_group=0, cwd=folder,
        )  # fmt: skip
    os.close(child_go)
    os.close(child_events)
    try:
        with watched("group", process.pid):
            try:
                yield SuiteProcess(environment, folder, process, go, events)
            finally:
                end_command(process)
    finally:
        os.close(go)
        os.close(events)
