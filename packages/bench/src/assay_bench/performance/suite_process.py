"""A process that runs one round of a suite per turn."""

import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from assay.runs import ProcessError
from assay.runs.processes.answering import SAME_HASHES
from assay.runs.processes.groups import end_command
from assay.watchdog import watched
from assay_bench.performance.environments import Environment
from assay_bench.performance.requests import SuiteEvent, SuiteRequest
from assay_bench.performance.suite_table import SpeedSuite

if TYPE_CHECKING:
    from assay_bench.performance.results import SuiteResult

# Enough for one round, and for loading and compiling a model before the first.
_ROUND_SECONDS = 1800.0


class SuiteProcess:
    """A running suite process. `suite_process` makes it."""

    def __init__(
        self, environment: Environment, log: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.skipped: dict[str, str] = {}
        """Reasons of suites that cannot run there."""
        self.waiting_for: str | None = None
        """The suite of the next round; None after the last suite."""
        self.results: list[SuiteResult] = []
        self.device: dict[str, Any] = {}
        self._environment, self._log, self._process = environment, log, process
        self._turns = cast("IO[bytes]", process.stdin)
        self._events = cast("IO[bytes]", process.stdout)

    def wait_until_ready(self) -> None:
        """Wait until the process can run a round or has ended.

        Raises: UsageError or MachineError that the process reports; MachineError if it writes nothing
            for half an hour; ProcessError with the end of the log if it failed.
        """
        self.waiting_for = None
        while (event := self._read_event()) is not None:
            if event.kind == "ready":
                self.waiting_for = event.suite
                return
            if event.kind == "skipped":
                self.skipped[event.suite] = event.reason
            elif event.result is not None:
                self.results.append(event.result)
                self.device = event.device
            else:
                raise (UsageError if event.kind == "usage" else MachineError)(event.reason)
        if code := self._process.wait():
            raise ProcessError.died("suite", code, self._log)

    def give_turn(self) -> None:
        """Let the process run a round, or begin the next suite. Returns at once."""
        with suppress(BrokenPipeError):  # the process ended, which `wait_until_ready` reports
            self._turns.write(b"\n")
            self._turns.flush()

    def run_round(self) -> None:
        """Let the process run a round, and wait for its end."""
        self.give_turn()
        self.wait_until_ready()

    def _read_event(self) -> SuiteEvent | None:
        """Read the next event; None after the last. Unbuffered, so that `select` sees every line."""
        if not select.select([self._events], [], [], _ROUND_SECONDS)[0]:
            raise MachineError(
                f"the suites of {self._environment.name} wrote nothing for {_ROUND_SECONDS:.0f} s;"
                f" log: {self._log}"
            )
        line = self._events.readline()
        try:
            return SuiteEvent.model_validate_json(line) if line else None
        except ValidationError as error:
            first = error.errors()[0]
            where = first["loc"][-1] if first["loc"] else "event"
            raise MachineError(
                f"{self._environment.name} has suites of another version: {where}: {first['msg']}"
            ) from None


@contextmanager
def suite_process(
    environment: Environment, suites: Sequence[SpeedSuite], request: SuiteRequest, folder: Path
) -> Iterator[SuiteProcess]:
    """Start a process for `suites` in `environment`. The context ends it and its children.

    folder: an existing folder for the log.
    """
    request = request.model_copy(update={"suites": [suite.name for suite in suites]})
    worker = "assay_bench.performance.suite_worker"
    log = folder / "suites.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.python, "-P", "-m", worker, request.model_dump_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0,
            env={**environment.variables, **SAME_HASHES}, process_group=0, cwd=folder,
        )  # fmt: skip
    with process, watched("group", process.pid):
        try:
            yield SuiteProcess(environment, log, process)
        finally:
            end_command(process)
