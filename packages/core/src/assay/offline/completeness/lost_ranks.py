"""Detection of ranks that a dump lost."""

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.ports.lanes import collect_lanes

# The values of this many ports are read. The majority decides.
_MOST_PLACES = 9


def find_lost_ranks(expected: Dump, actual: Dump) -> set[int]:
    """Return the ranks that only EXPECTED holds, if the other ranks hold the same parts on both sides.

    A run on fewer ranks holds whole tensors, sums or larger parts instead.
    """
    kept, lost = set(actual.ranks), set(expected.ranks) - set(actual.ranks)
    if not lost or not kept <= set(expected.ranks):
        return set()
    votes: list[bool] = []
    others = collect_lanes(actual)
    for port, lane in collect_lanes(expected).items():
        # The first call, on all ranks.
        both = [next(iter(one.tensors.values())) for one in (lane, others.get(port)) if one]
        if len(both) < 2 or len(both[0]) <= len(both[1]):
            continue
        shapes = {one.site.at.rank: one.shape for one in both[0]}
        if any(one.shape != shapes.get(one.site.at.rank) for one in both[1]):
            return set()
        if len(votes) < _MOST_PLACES and "float" in lane.first.dtype:
            votes += _vote(expected, actual, both[0], both[1])
    return lost if sum(votes) * 2 > len(votes) else set()


def _vote(
    expected: Dump, actual: Dump, parts: Sequence[DumpedTensor], others: Sequence[DumpedTensor]
) -> list[bool]:
    """Return [True] if a value is nearer to the value of its own rank than to the sum; [] for replicas."""
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
