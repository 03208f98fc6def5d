"""The first wrong operation of a stage.

The stage runs three times on the same inputs: as yardstick, noise run and candidate. Their operations are
aligned by name, and compared like the ports of stages. Those of several ranks are first put together into
those of the whole module: a rank computes some features or heads of a result, or a summand of it. Shapes,
and the arrangement that is closest to the reference, tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.dtypes import FORMATS
from assay.hooks.row_positions import RowIndex
from assay.judge.limits import Limits
from assay.metrics import PairSums
from assay.noise import NO_NOISE, error_ratios
from assay.recording.modules import ATTENTION, COLLECTIVES, MOVING, WAIT, Operation, align_names
from assay.sites import RowMap
from assay.verdicts import Ratio

SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class WrongOperation:
    """The first wrong operation."""

    name: str
    number: int
    """Its number among the operations that compute."""
    ratio: Ratio | None
    """None if the reference has no such operation."""


def find_wrong_operation(
    actual: Sequence[Operation],
    expected: Sequence[Operation],
    noise: Sequence[Operation],
    limits: Limits,
    unit_roundoff: float,
    rows: RowMap | None = None,
) -> WrongOperation | None:
    """Find the first operation over a limit, or else the one that the reference lacks.

    rows: of the call; padding is ignored.
    Returns: None if all operations have partners and are within the limits, or if several may be wrong.
    """
    actual, expected, noise = (computing(side) for side in (actual, expected, noise))
    found = _find_first(actual, expected, noise, limits, unit_roundoff, rows)
    if _names_of(actual) == _names_of(expected):
        return found
    # A softmax is wrong by itself if its input has a partner, and was compared.
    is_softmax = found is not None and found.name == SOFTMAX
    if is_softmax and found is not None and found.number - 1 in _align(actual, expected):
        return found
    actual, expected, noise = (with_attention(side) for side in (actual, expected, noise))
    return _find_first(actual, expected, noise, limits, unit_roundoff, rows)


def _find_first(
    actual: Sequence[Operation],
    expected: Sequence[Operation],
    noise: Sequence[Operation],
    limits: Limits,
    unit_roundoff: float,
    rows: RowMap | None,
) -> WrongOperation | None:
    partners = _align(actual, expected)
    noise_partners = {j: i for i, j in _align(noise, expected).items()}

    def compare(operation: Operation, partner: int) -> tuple[Ratio | None, bool]:
        number = noise_partners.get(partner)
        reference = noise[number] if number is not None else None
        ratio = _worst_ratio(operation, expected[partner], reference, limits, unit_roundoff, rows)
        return ratio, ratio is None or not ratio.value > limits.of(ratio.statistic)

    has_equal_names = _names_of(actual) == _names_of(expected)

    def is_of_reference(operation: Operation) -> bool:
        """Return True if another operation of the reference has this result."""
        return not has_equal_names and any(
            _have_one_size(operation, expected[other]) and compare(operation, other)[1]
            for other in range(len(expected))
        )

    extra: list[int] = []
    suspects: list[int] = []  # of them, those after the last right operation
    for number, operation in enumerate(actual):
        partner = partners.get(number)
        ratio, is_right = (None, False) if partner is None else compare(operation, partner)
        if is_right or is_of_reference(operation):
            suspects = []
        elif ratio is not None:
            # Without its inputs, it cannot be told from the operations that may have made them.
            return None if suspects else WrongOperation(operation.name, number, ratio)
        else:
            extra.append(number)
            suspects.append(number)
    found = extra if len(extra) == 1 else suspects
    return WrongOperation(actual[found[0]].name, found[0], None) if len(found) == 1 else None


def computing(operations: Sequence[Operation]) -> list[Operation]:
    """Drop casts and copies, which depend on the dtype and kernels of a run.

    Their errors appear in the next operation that computes.
    """
    return [operation for operation in operations if operation.name not in MOVING]


def with_attention(operations: Sequence[Operation]) -> list[Operation]:
    """Merge attention that is written out as products around a softmax into one operation.

    Some implementations scale queries and keys, others scale their product. They share only the
    inputs and the result of attention.
    """
    names = _names_of(operations)
    found: list[Operation] = []
    done = 0
    for softmax in (number for number, name in enumerate(names) if name == SOFTMAX):
        first = max((n for n in range(done, softmax) if names[n] == "matmul"), default=-1)
        last = next((n for n in range(softmax, len(names)) if names[n] == "matmul"), -1)
        if first < 0 or last < 0:
            continue
        while first > done and names[first - 1] == "mul":
            first -= 1
        found += operations[done:first]
        found.append(replace(operations[last], name=ATTENTION))
        done = last + 1
    return [*found, *operations[done:]]


def _align(actual: Sequence[Operation], expected: Sequence[Operation]) -> dict[int, int]:
    """Map the number of each operation to the number of its partner, in order."""
    partners = {
        i: j
        for i, j in align_names(_names_of(actual), _names_of(expected)).items()
        if _have_one_size(actual[i], expected[j])
    }
    # A fused operation has the result of the last operation that it replaces.
    if actual and expected and len(actual) - 1 not in partners:
        last = len(expected) - 1
        if last not in partners.values() and _have_one_size(actual[-1], expected[last]):
            partners[len(actual) - 1] = last
    return partners


def _names_of(operations: Sequence[Operation]) -> list[str]:
    return [operation.name for operation in operations]


def _have_one_size(actual: Operation, expected: Operation) -> bool:
    """Return True if both results have one size. A fused operation may return more than its result."""
    pairs = zip(actual.outputs, expected.outputs, strict=False)
    return all(ours.numel() == theirs.numel() for ours, theirs in pairs)


def _worst_ratio(
    actual: Operation,
    expected: Operation,
    noise: Operation | None,
    limits: Limits,
    unit_roundoff: float,
    rows: RowMap | None,
) -> Ratio | None:
    worst: Ratio | None = None
    for number, tensor in enumerate(actual.outputs[: len(expected.outputs)]):
        reference = expected.outputs[number]
        sums = _sums(tensor, reference, rows)
        noise_sums = NO_NOISE
        unit = unit_roundoff
        if noise is not None and number < len(noise.outputs):
            noise_sums = _sums(noise.outputs[number], reference, rows)
            # Models compute tables and norms in float32 whatever the dtype of their weights.
            unit = min(unit, _unit_roundoff(noise.outputs[number], unit))
        if sums.num_nan or sums.num_inf:
            return Ratio("non-finite", float("nan"), 0.0)
        for ratio in error_ratios(sums, noise_sums, unit):
            severity = ratio.value / limits.of(ratio.statistic)
            if worst is None or severity > worst.value / limits.of(worst.statistic):
                worst = ratio
    return worst


def _unit_roundoff(tensor: Tensor, otherwise: float) -> float:
    name = str(tensor.dtype).removeprefix("torch.")
    return FORMATS[name].unit_roundoff if name in FORMATS else otherwise


def _sums(actual: Tensor, expected: Tensor, rows: RowMap | None) -> PairSums:
    shape = tuple(actual.shape)
    if rows is not None and len(shape) == 3 and shape[1] == rows.length:
        heads, rest = divmod(shape[0], rows.num_rows)
        if heads > 1 and not rest:  # batched products join batch and heads in one dim
            shape = (rows.num_rows, heads, *shape[1:])
    sums = PairSums()
    (actual_RC, expected_RC), prompt, position = RowIndex(rows).flatten(
        actual.reshape(shape), expected.reshape(shape)
    )
    sums.add(actual_RC, expected_RC, prompt, position)
    return sums


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
    names = [_names_of(side) for side in (own[0], expected, noise)]
    partners, of_noise = align_names(*names[:2]), align_names(*names[1:])
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
    names = [_names_of(side) for side in sides]
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
