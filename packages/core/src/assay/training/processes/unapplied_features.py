"""Features of a plan that a trainer took without a word, and did not apply."""

import sys
from collections.abc import Collection, Mapping, Sequence

from assay.locating.matching.packed_trace import PackedBatch
from assay.training.protocol import COMPILE, LOSS_SCALING, PACKED

# At which level a feature that is missing is named, and what a run without it does.
_WITHOUT: Mapping[str, tuple[str, str]] = {
    PACKED: ("inputs", "no step ran rows laid end to end in one"),
    COMPILE: ("activations", "nothing was compiled"),
    LOSS_SCALING: ("gradients", "no loss was scaled"),
}


def count_compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def find_unapplied(
    features: Collection[str], packings: Sequence[PackedBatch], *, num_graphs: int, num_scaled: int
) -> list[str]:
    """Which of `features` are not seen in a run.

    packings: micro-batches that were run as one; num_graphs: those that were compiled; num_scaled: steps
        whose loss was scaled, or that were skipped.
    """
    seen = {
        PACKED: any(one.num_rows == 1 and len(one.segments) > 1 for one in packings),
        COMPILE: num_graphs > 0,
        LOSS_SCALING: num_scaled > 0,
    }
    return [feature for feature in seen if feature in features and not seen[feature]]


def describe_unapplied(unapplied: Sequence[str], level: str) -> str | None:
    """Why `level` is no PASS where these features are missing; None where none of them belongs to it."""
    for feature in unapplied:
        where, done = _WITHOUT[feature]
        if where == level:
            return f"{feature} was asked for and is not applied: {done}"
    return None
