"""Messages to and from a suite process. Imports neither torch nor pytest."""

import os
from typing import Literal, Self

from assay.errors import AssayError, UsageError
from assay.verdicts import Record

REQUEST_VARIABLE = "ASSAY_BENCH_SUITES"

# Discarded rounds, which fill caches, allocators and kernels.
NUM_WARMUP_ROUNDS = 3


class SuiteRequest(Record):
    """Settings of the tests in `suites/`. The defaults serve a plain pytest run."""

    run: str = "cpu/float32"
    model: str = "micro:llama"
    num_rounds: int = 20
    """Timed rounds of each suite, after its warm-up."""
    go: int | None = None
    """Pipe that delivers one byte per turn; None if all turns belong to this process."""
    events: int | None = None
    """Pipe for one `SuiteEvent` line before each turn; None as for `go`."""

    @property
    def num_turns(self) -> int:
        """Return how often a suite waits: before each round, and after the last."""
        return NUM_WARMUP_ROUNDS + self.num_rounds + 1

    @classmethod
    def of_environment(cls) -> Self:
        """Read the request in REQUEST_VARIABLE, or use the defaults."""
        return cls.model_validate_json(os.environ.get(REQUEST_VARIABLE, "{}"))


class SuiteEvent(Record):
    """A line that a suite process writes."""

    kind: Literal["ready", "skipped", "usage", "machine"]
    """ready: waits for a turn, or ran its last round. skipped: the suite cannot run here.

    usage, machine: no suite can run because of an error of the user or of the machine.
    """
    suite: str = ""
    reason: str = ""


class TurnClient:
    """Waits for turns. Without pipes, all turns belong to this process."""

    def __init__(self, request: SuiteRequest) -> None:
        self._go, self._events = request.go, request.events

    def wait(self, suite: str) -> None:
        """Wait for a turn; called before each round of `suite`, and once after the last.

        Raises: EOFError if the process that gives the turns has ended.
        """
        if self._go is None:
            return
        self._send(SuiteEvent(suite=suite, kind="ready"))
        if not os.read(self._go, 1):
            raise EOFError("the process that gives the turns has ended")

    def skip(self, suite: str, reason: str) -> None:
        """Report a suite that cannot run here."""
        self._send(SuiteEvent(suite=suite, kind="skipped", reason=reason))

    def report_error(self, error: AssayError) -> None:
        """Report an error that prevents all suites from running."""
        kind = "usage" if isinstance(error, UsageError) else "machine"
        self._send(SuiteEvent(kind=kind, reason=str(error)))

    def _send(self, event: SuiteEvent) -> None:
        if self._events is not None:
            os.write(self._events, event.model_dump_json().encode() + b"\n")
