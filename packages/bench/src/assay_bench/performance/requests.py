"""Messages to and from a suite process. Imports neither torch nor pytest."""

import os
from typing import Literal, Self

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
