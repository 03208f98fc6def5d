"""The suites, with the control of each."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from assay.errors import UsageError

# A product of two square matrices, or a pass over a tensor larger than the caches.
Control = Literal["matmul", "read"]

# The functions of suites.py, with hyphens in their names, in the order of their run. The control is the divisor
# of the times of a suite: matmul if arithmetic dominates, read if memory traffic does.
SUITES: dict[str, Control] = {
    "training-step": "matmul",
    "prefill": "matmul",
    "decode": "read",
    "collectives": "read",
    "capture": "read",
    "compare": "read",
    "checkpoint-save": "read",
    "checkpoint-load": "read",
}


def require_suites(
    names: Iterable[str], known: Collection[str] = SUITES.keys(), where: str = ""
) -> None:
    """Raise UsageError for a name that is not in `known`. where: the environment; "" for this one."""
    for name in names:
        if name not in known:
            raise UsageError(f"no suite {name!r}{where}; suites: {', '.join(known)}")


def choose_suites(names: Sequence[str]) -> list[str]:
    """Return the named suites in the order of their run; all suites without names.

    Raises: UsageError.
    """
    require_suites(names)
    return [suite for suite in SUITES if not names or suite in names]
