"""The suites, with the control of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from assay.errors import UsageError

# A product of two square matrices, or a pass over a tensor larger than the caches.
Control = Literal["matmul", "read"]


@dataclass(frozen=True, slots=True)
class SpeedSuite:
    """One function of suites.py."""

    name: str
    control: Control
    """The divisor of its times: matmul if arithmetic dominates, read if memory traffic does."""

    @property
    def function(self) -> str:
        """Return the name of its function."""
        return self.name.replace("-", "_")


SUITES = {
    suite.name: suite
    for suite in (
        SpeedSuite("training-step", "matmul"),
        SpeedSuite("prefill", "matmul"),
        SpeedSuite("decode", "read"),
        SpeedSuite("collectives", "read"),
        SpeedSuite("capture", "read"),
        SpeedSuite("compare", "read"),
        SpeedSuite("checkpoint-save", "read"),
        SpeedSuite("checkpoint-load", "read"),
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
