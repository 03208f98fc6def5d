"""This process's side of taking turns with another that is measured at the same time."""

import os

from assay.errors import AssayError, UsageError
from assay_bench.performance.requests import SuiteEvent, SuiteRequest


class TurnClient:
    """Waits until no other process measures; without pipes every turn is this process's."""

    def __init__(self, request: SuiteRequest) -> None:
        self._go, self._events = request.go, request.events

    def wait(self, suite: str) -> None:
        """Called before each round of `suite`, and once after the last.

        Raises: EOFError if the process that gives the turns is gone.
        """
        if self._go is None:
            return
        self._send(SuiteEvent(suite=suite, kind="ready"))
        if not os.read(self._go, 1):
            raise EOFError("nobody gives turns any more")

    def skip(self, suite: str, reason: str) -> None:
        """Called for a suite that cannot run here."""
        self._send(SuiteEvent(suite=suite, kind="skipped", reason=reason))

    def refuse(self, error: AssayError) -> None:
        """Called for a device or a model with which no suite can run."""
        kind = "usage" if isinstance(error, UsageError) else "machine"
        self._send(SuiteEvent(kind=kind, reason=str(error)))

    def _send(self, event: SuiteEvent) -> None:
        if self._events is not None:
            os.write(self._events, event.model_dump_json().encode() + b"\n")
