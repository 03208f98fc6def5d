"""Python environments whose speed is measured, and their processes, which run one round of a suite per turn."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from assay.launch import SAME_HASHES, ProcessError, end_command
from assay.watchdog import watched
from assay_bench.performance.records import SuiteEvent, SuiteRequest, SuiteResult
from assay_bench.performance.suite_table import SUITES, require_suites

# The first start can read torch's metadata from a cold disk.
_PROBE_SECONDS = 120

# Another environment must use only its own packages.
_VARIABLES_OF_THIS_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
from assay_bench.performance.suite_table import SUITES
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
print(json.dumps({
    "suites": list(SUITES),
    "versions": {name: known(name) for name in
                 ("torch", "transformers", "assay-core", "assay-bench", "numpy")},
}))
"""


def _make_no_python_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not an environment: neither a folder with bin/python nor a Python executable"
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment with the suites."""

    name: str
    python: Path
    suites: Collection[str]
    """Names of its suites."""
    versions: Mapping[str, str]
    """Versions of the packages that affect speed."""
    variables: Mapping[str, str]
    """Environment variables of its processes."""

    @classmethod
    def current(cls) -> Self:
        """Return the environment of this process."""
        return cls("this environment", Path(sys.executable), list(SUITES), {}, dict(os.environ))

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a virtual environment by its folder or its Python executable.

        Raises: UsageError if it has no Python or no suites; MachineError if its
            Python does not respond.
        """
        python = _find_python(path)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in _VARIABLES_OF_THIS_ENVIRONMENT
        }
        try:
            done = subprocess.run(
                [python, "-P", "-c", _PROBE],
                capture_output=True, text=True, check=False, env=variables, timeout=_PROBE_SECONDS,
            )  # fmt: skip
        except OSError as error:
            raise _make_no_python_error(path) from error
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{python} did not respond within {_PROBE_SECONDS} s") from error
        try:
            answer = json.loads(done.stdout)
            return cls(str(path), python, answer["suites"], answer["versions"], variables)
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise UsageError(
                f"{python} lacks the suites of assay-bench ({lines[-1]}); install assay-bench there with pip"
            ) from None

    def require(self, suites: Iterable[str]) -> None:
        """Raise UsageError for a missing suite."""
        require_suites(suites, self.suites, f" in {self.name}")


def _find_python(path: Path) -> Path:
    candidates = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    if path.is_file():
        candidates = [path]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: Python finds a virtual environment by the path of the link.
            return candidate.absolute()
    raise _make_no_python_error(path)


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
    environment: Environment, request: SuiteRequest, folder: Path
) -> Iterator[SuiteProcess]:
    """Start a process for the suites of `request` in `environment`. The context ends it and its children.

    folder: an existing folder for the log.
    """
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
