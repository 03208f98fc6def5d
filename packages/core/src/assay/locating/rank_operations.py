"""Put the operations of a module's ranks together into those of the whole module.

A rank computes some features or heads of a result, or a summand of it. Shapes, and the arrangement that
is closest to the reference, tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.locating.operations import align_names, computing, with_attention
from assay.recording.operations import COLLECTIVES, WAIT, Operation

_SUM = "all_reduce"

# Number of equal parts of fused weights, each divided over the ranks: gate and up; queries, keys, values.
_FUSED = (1, 2, 3)

Sides = tuple[list[Operation], list[Operation], list[Operation]]


def put_together(
    of_ranks: Sequence[Sequence[Operation]],
    expected: Sequence[Operation],
    noise: Sequence[Operation],
) -> Sides | None:
    """Return the operations of the whole module, with those of yardstick and noise run to compare.

    of_ranks: the operations of each rank, which are returned as they are if there is one.
    A sum over ranks is compared with the operation that makes the summands. Operations whose shapes do not
    say how they belong together are left out.
    Returns: None if the ranks run other operations than each other.
    """
    if len(of_ranks) == 1:
        return list(of_ranks[0]), list(expected), list(noise)
    ranks = [_OfRank.of(one) for one in of_ranks]
    sums = [rank.sums for rank in ranks]
    sides = [*(rank.own for rank in ranks), computing(expected), computing(noise)]
    if not _have_same_names(sides):
        sides, sums = [with_attention(side) for side in sides], [{}]  # other numbers
    *own, expected, noise = sides
    if not _have_same_names(own):
        return None
    partners, of_noise = align_names(own[0], expected), align_names(expected, noise)
    whole: Sides = ([], [], [])
    for number, operation in enumerate(own[0]):
        if number not in partners:  # the reference has none
            whole[0].append(operation)
            continue
        partner = partners[number]
        made = {operation.name: [operations[number] for operations in own]}
        if all(number in one for one in sums):
            made[_SUM] = [one[number] for one in sums]
        for name, parts in made.items():
            if (found := _whole(parts, expected[partner])) is not None:
                whole[0].append(replace(found, name=name))
                whole[1].append(replace(expected[partner], name=name))
                if partner in of_noise:
                    whole[2].append(replace(noise[of_noise[partner]], name=name))
    return whole


def _have_same_names(sides: Sequence[Sequence[Operation]]) -> bool:
    names = [[operation.name for operation in side] for side in sides]
    return all(one == names[0] for one in names)


@dataclass(frozen=True, slots=True)
class _OfRank:
    """The operations of one rank that compute, and the sums over all ranks that follow them."""

    own: list[Operation]
    sums: dict[int, Operation]
    """By number of the operation that makes the summands."""

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> "_OfRank":
        own: list[Operation] = []
        sums: dict[int, Operation] = {}
        begun = -1  # the last operation whose results are summed
        for operation in operations:
            if not operation.overload.startswith(COLLECTIVES):
                own += computing([operation])
            elif operation.name == _SUM:
                begun = len(own) - 1
            elif operation.name == WAIT and begun >= 0:
                sums[begun] = operation
        return cls(own, sums)


def _whole(parts: Sequence[Operation], expected: Operation) -> Operation | None:
    """Put an operation of all ranks together; None if its shapes do not say how."""
    outputs = []
    for number, wanted in enumerate(expected.outputs):
        tensors = [one.outputs[number].double() for one in parts]
        found = _arrange(tensors, wanted.double())
        if found is None:
            return None
        outputs.append(found)
    return replace(parts[0], outputs=tuple(outputs))


def _arrange(parts: list[Tensor], expected: Tensor) -> Tensor | None:
    """Arrange the results of all ranks as `expected`, in float64."""

    def error(tensor: Tensor) -> float:
        return float((tensor - expected).norm().nan_to_num(torch.inf))  # NaN is the worst

    if all(part.shape == expected.shape for part in parts):
        total = torch.stack(parts).sum(0)
        if error(total) <= min(map(error, parts)):  # equal where the other summands are zero
            return total
        return max(parts, key=error)
    dims = [
        dim
        for dim, size in enumerate(expected.shape)
        if parts[0].ndim == expected.ndim and parts[0].shape[dim] != size
    ]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != expected.shape[dims[0]]:
        return None
    (dim,) = dims
    arranged = [
        torch.cat([part.chunk(count, dim)[k] for k in range(count) for part in parts], dim)
        for count in _FUSED
        if all(part.shape[dim] % count == 0 for part in parts)
    ]
    return min(arranged, key=error)
