"""Ranks that a dump has lost: it holds the shards of the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.ports.lanes import Lane, collect_lanes

# Places whose values are read. Their majority decides.
_MOST_PLACES = 9


def find_lost_ranks(expected: Dump, actual: Dump) -> set[int]:
    """Return the ranks that EXPECTED alone holds, if the others hold the same parts on both sides.

    A run on fewer ranks holds wholes, sums or larger parts instead.
    """
    kept = {one.site.at.rank for one in actual.tensors}
    lost = {one.site.at.rank for one in expected.tensors} - kept
    if not lost or not kept <= {one.site.at.rank for one in expected.tensors}:
        return set()
    votes: list[bool] = []
    others = collect_lanes(actual)
    for port, lane in collect_lanes(expected).items():
        both = [_first_of_all_ranks(one) for one in (lane, others.get(port)) if one is not None]
        if len(both) < 2 or len(both[0]) <= len(both[1]):
            continue
        shapes = {one.site.at.rank: one.shape for one in both[0]}
        if any(one.shape != shapes.get(one.site.at.rank) for one in both[1]):
            return set()
        if len(votes) < _MOST_PLACES and "float" in lane.first.dtype:
            votes += _vote(expected, actual, both[0], both[1])
    return lost if sum(votes) * 2 > len(votes) else set()


def _first_of_all_ranks(lane: Lane) -> list[DumpedTensor]:
    return next(iter(lane.tensors.values()))


def _vote(
    expected: Dump, actual: Dump, parts: Sequence[DumpedTensor], others: Sequence[DumpedTensor]
) -> list[bool]:
    """Return [True] for values nearer to those of the same rank than to their sum; [] for replicas."""
    if not all(one.has_values for one in (*parts, *others)):
        return []
    values = {
        one.site.at.rank: value.double()
        for one in parts
        if (value := expected.read_intact(one)) is not None
    }
    other = actual.read_intact(others[0])
    if other is None or len(values) < len(parts):
        return []
    if len({one.shape for one in values.values()}) > 1:
        return [True]
    own = values[others[0].site.at.rank]
    if all(torch.equal(one, own) for one in values.values()):
        return []
    total = torch.stack([*values.values()]).sum(0)
    return [_distance(other.double(), own) < _distance(other.double(), total)]


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other))
