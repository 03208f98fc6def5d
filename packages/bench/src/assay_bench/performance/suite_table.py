"""The suites by name: which test measures each, and beside which control."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.errors import UsageError

# A product of two square matrices, or one pass over a tensor larger than the caches.
Control = Literal["matmul", "read"]

SUITE_FOLDER = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class SpeedSuite:
    """One test of `suites/`.

    control: the measurement of the machine by which its times are divided: the matrix product where
        arithmetic is most of the work, reading where moving bytes is.
    """

    name: str
    file: str
    function: str
    control: Control

    @property
    def node(self) -> str:
        """What pytest is given to run it."""
        return f"{SUITE_FOLDER / self.file}::{self.function}"


SUITES = {
    suite.name: suite
    for suite in (
        SpeedSuite("training-step", "test_training.py", "test_training_step", "matmul"),
        SpeedSuite("prefill", "test_generation.py", "test_prefill", "matmul"),
        SpeedSuite("decode", "test_generation.py", "test_decode", "read"),
        SpeedSuite("collectives", "test_collectives.py", "test_all_reduce", "read"),
        SpeedSuite("capture", "test_traces.py", "test_capture", "read"),
        SpeedSuite("compare", "test_traces.py", "test_compare", "read"),
        SpeedSuite("checkpoint-save", "test_checkpoints.py", "test_save", "read"),
        SpeedSuite("checkpoint-load", "test_checkpoints.py", "test_load", "read"),
    )
}


class UnknownSuiteError(UsageError):
    """No suite has this name."""

    @classmethod
    def of(cls, name: str, known: Sequence[str], where: str = "") -> "UnknownSuiteError":
        """`where`: of which environment `known` are the suites; "" for this one."""
        return cls(f"there is no suite {name!r}{where}; there is: {', '.join(known)}")


def choose_suites(names: Sequence[str]) -> tuple[SpeedSuite, ...]:
    """The suites called `names`, in the order in which they run; all where none is named.

    Raises: UnknownSuiteError.
    """
    for name in names:
        if name not in SUITES:
            raise UnknownSuiteError.of(name, tuple(SUITES))
    return tuple(suite for suite in SUITES.values() if not names or suite.name in names)
