"""Client side of the turns with another suite process."""

import os

from assay.errors import AssayError, UsageError
from assay_bench.performance.requests import SuiteEvent, SuiteRequest


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
