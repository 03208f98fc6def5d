"""The suites, with the test and the control of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.errors import UsageError

# A product of two square matrices, or a pass over a tensor larger than the caches.
Control = Literal["matmul", "read"]

SUITE_FOLDER = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class SpeedSuite:
    """One test of `suites/`."""

    name: str
    file: str
    function: str
    control: Control
    """The divisor of its times: matmul if arithmetic dominates, read if memory traffic does."""

    @property
    def node(self) -> str:
        """Return the pytest node."""
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


def make_unknown_suite_error(name: str, known: Sequence[str], where: str = "") -> UsageError:
    """Make the error. where: the environment of the `known` suites; "" for this one."""
    return UsageError(f"there is no suite {name!r}{where}; suites: {', '.join(known)}")


def choose_suites(names: Sequence[str]) -> tuple[SpeedSuite, ...]:
    """Return the named suites in the order of their run; all suites without names.

    Raises: UsageError.
    """
    for name in names:
        if name not in SUITES:
            raise make_unknown_suite_error(name, tuple(SUITES))
    return tuple(suite for suite in SUITES.values() if not names or suite.name in names)
