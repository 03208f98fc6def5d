"""Messages to and from a suite process. Imports no torch."""

import os
import sys
from typing import Any, Literal

from pydantic import Field

from assay.verdicts import Record
from assay_bench.performance.results import SuiteResult

# Discarded rounds, which fill caches, allocators and kernels.
NUM_WARMUP_ROUNDS = 3


class SuiteRequest(Record):
    """The suites to measure, and their settings."""

    suites: list[str] = Field(default_factory=list)
    """Names, in the order of their run."""
    run: str = "cpu/float32"
    model: str = "micro:llama"
    num_rounds: int = 20
    """Timed rounds of each suite, after its warm-up."""

    @property
    def num_turns(self) -> int:
        """Return how often a suite waits: before each round, and after the last."""
        return NUM_WARMUP_ROUNDS + self.num_rounds + 1


class SuiteEvent(Record):
    """A line that a suite process writes."""

    kind: Literal["ready", "measured", "skipped", "usage", "machine"]
    """ready: waits for a turn. measured: the suite has a result. skipped: it cannot run here.

    usage, machine: no suite can run because of an error of the user or of the machine.
    """
    suite: str = ""
    reason: str = ""
    result: SuiteResult | None = None
    device: dict[str, Any] = Field(default_factory=dict)
    """As from `assay.devices.registry.describe_run`."""


class TurnClient:
    """Waits for turns, a line of standard input each, and writes events to standard output."""

    def __init__(self) -> None:
        self._events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what libraries print belongs in the log

    def wait(self, suite: str) -> None:
        """Wait for a turn; called before each round of `suite`, and once after the last.

        Raises: EOFError if the process that gives the turns has ended.
        """
        self.send(SuiteEvent(kind="ready", suite=suite))
        if not sys.stdin.readline():
            raise EOFError("the process that gives the turns has ended")

    def send(self, event: SuiteEvent) -> None:
        """Write an event."""
        self._events.write(event.model_dump_json() + "\n")
        self._events.flush()
