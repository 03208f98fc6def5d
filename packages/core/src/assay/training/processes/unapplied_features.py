"""Finds features of a plan that a trainer silently ignored."""

import sys
from collections.abc import Collection, Mapping, Sequence

from assay.locating.trace_views import PackedBatch
from assay.training.protocol import COMPILE, LOSS_SCALING, PACKED

# The level that reports a missing feature, and the evidence that it is missing.
_WITHOUT: Mapping[str, tuple[str, str]] = {
    PACKED: ("inputs", "no step ran rows laid end to end in one"),
    COMPILE: ("activations", "nothing was compiled"),
    LOSS_SCALING: ("gradients", "no loss was scaled"),
}


def count_compiled_graphs() -> int:
    """Count the graphs that torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def find_unapplied(
    features: Collection[str], packings: Sequence[PackedBatch], *, num_graphs: int, num_scaled: int
) -> list[str]:
    """Find the `features` without evidence in a run.

    packings: micro-batches that were run as one.
    num_graphs: number of compiled graphs.
    num_scaled: number of steps with a scaled loss, and of skipped steps.
    """
    seen = {
        PACKED: any(one.num_rows == 1 and len(one.segments) > 1 for one in packings),
        COMPILE: num_graphs > 0,
        LOSS_SCALING: num_scaled > 0,
    }
    return [feature for feature in seen if feature in features and not seen[feature]]


def describe_unapplied(unapplied: Sequence[str], level: str) -> str | None:
    """Explain why `level` cannot pass without these features; None if it reports none of them."""
    for feature in unapplied:
        where, done = _WITHOUT[feature]
        if where == level:
            return f"{feature} was asked for and is not applied: {done}"
    return None
