"""What a process of suites is asked for, and what it says while it runs.

Imports neither torch nor pytest.
"""

import os
from typing import Literal, Self

from assay.verdicts import Record

REQUEST_VARIABLE = "ASSAY_BENCH_SUITES"

# Rounds that are run first and not kept: caches, allocators and kernels that are made at first use.
NUM_WARMUP_ROUNDS = 3


class SuiteRequest(Record):
    """What the tests in `suites/` measure; their defaults are those of a plain pytest run.

    num_rounds: how often each suite is timed, after its warm-up.
    go, events: descriptors of the pipes to the process that gives the turns, None without one.
        Before each round a line is written to `events` and one byte is awaited from `go`.
    """

    run: str = "cpu/float32"
    model: str = "micro:llama"
    num_rounds: int = 20
    go: int | None = None
    events: int | None = None

    @property
    def num_turns(self) -> int:
        """How often a suite waits: before each round, and after the last."""
        return NUM_WARMUP_ROUNDS + self.num_rounds + 1

    @classmethod
    def of_environment(cls) -> Self:
        """The request in REQUEST_VARIABLE, the defaults where it is not set."""
        return cls.model_validate_json(os.environ.get(REQUEST_VARIABLE, "{}"))


class SuiteEvent(Record):
    """A line that a process of suites writes.

    ready: it waits for its turn, or has run its last round. skipped: the suite cannot run there.
    usage, machine: no suite can, as an error of the caller or of the machine.
    """

    kind: Literal["ready", "skipped", "usage", "machine"]
    suite: str = ""
    reason: str = ""
