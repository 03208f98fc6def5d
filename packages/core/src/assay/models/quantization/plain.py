"""Weights that are stored as floating-point numbers on both sides."""

import torch
from torch import Tensor

from assay.models.quantization.results import Cause, Finding, Place, WeightResult

_CHUNK_ELEMENTS = 1 << 22

# Two values that differ by a factor leave less than this part of their difference to a fit.
_MOST_REMAINING = 0.05


def compare_plain(name: str, file: str, expected: Tensor, actual: Tensor) -> WeightResult:
    """Compare two tensors of one shape: equal, up to the rounding of the coarser dtype if they have two."""
    dtypes = [one.dtype for one in (expected, actual)]
    is_float = all(one.is_floating_point for one in dtypes)
    rounding, smallest = 0.0, 0.0
    if dtypes[0] != dtypes[1] and is_float:
        facts = [torch.finfo(one) for one in dtypes]
        rounding = max(one.eps for one in facts) / 2
        smallest = max(one.smallest_normal * one.eps for one in facts)
    num_rows, row_size = (
        (len(expected), expected[0].numel()) if expected.dim() and len(expected) else (1, 1)
    )
    squares = errors = products = 0.0
    different = 0
    rows: list[Tensor] = []
    step = max(1, _CHUNK_ELEMENTS // max(1, row_size))
    for start in range(0, num_rows, step):
        want, have = (
            one.reshape(num_rows, -1)[start : start + step].double() for one in (expected, actual)
        )
        differs = ~torch.isclose(have, want, rtol=rounding, atol=smallest, equal_nan=True)
        different += int(differs.sum())
        rows.append(differs.any(1).nonzero()[:, 0] + start)
        squares += float(want.square().sum())
        errors += float((have - want).square().sum())
        products += float((want * (have - want)).sum())
    error = (errors / squares) ** 0.5 if squares else float("inf") if errors else 0.0
    if not different:
        return WeightResult(name, file, 1, error, rounding, 0.0)
    slope = products / squares if squares else 0.0
    is_factor = errors - slope * products < _MOST_REMAINING * errors
    cause: Cause = "scale" if is_factor else "values"
    wrong = torch.cat(rows)
    place = Place(range(int(wrong[0]), int(wrong[-1]) + 1), ())
    finding = Finding(name, cause, error, rounding, place, 1 + slope if is_factor else 0.0)
    is_other = 2 * different > expected.numel()
    return WeightResult(
        name, file, 1, error, rounding, finding.ratio, findings=(finding,), is_other=is_other
    )
