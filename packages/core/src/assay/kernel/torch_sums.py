"""The sums of the kernel, computed by operations of torch: for machines without a compiler.

Shape legend: R rows (tokens), C channels (last dim), T tokens, V vocabulary.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from assay.kernel.sums import (
    BINNED_ELEMENTS,
    FEWEST_IN_ROW,
    LARGEST_STRIDE,
    MASKED_SIZE,
    NUM_BINS,
    NUM_CHANNEL_SUMS,
    ROW_FLOOR,
    SUMMANDS,
    CallSums,
    Extent,
    TokenSums,
    WorstElement,
    bin_of,
    factors,
)

# Elements of one step: a float64 intermediate result of 1 MB fits the caches.
_STEP_ELEMENTS = 1 << 17

_LARGEST_IN_SERIES = 4.0
# Below it expm1(c) - c cancels, and four terms of its series are exact.
_SMALL_CHANGE = 1e-3


def sum_pair(actual_RC: Tensor, expected_RC: Tensor, extent: Extent) -> CallSums:
    """Compute `assay.kernel.sum_pair` by operations of torch."""
    num_rows, num_channels = actual_RC.shape
    shapes = (3, num_rows), (NUM_CHANNEL_SUMS, num_channels), (6, NUM_BINS), (4,)
    rows, channels, bins, slopes = (torch.zeros(one, dtype=torch.float64) for one in shapes)
    sums = CallSums(rows=rows, channels=channels, bins=bins, row_slopes=slopes)
    if not actual_RC.numel():
        return sums
    of_rows = {name: torch.zeros(num_rows, dtype=torch.float64) for name in SUMMANDS}
    height = max(1, _STEP_ELEMENTS // num_channels)
    for start in range(0, num_rows, height):
        span = slice(start, start + height)
        actual, expected = _take_masks(actual_RC[span], expected_RC[span])
        if extent == "pointwise":
            rounded = expected.to(actual_RC.dtype).double()
            sums.num_misrounded += int((rounded != actual).sum())
        d, e = actual - expected, expected
        finite = d.isfinite()
        wrong = ~actual.isfinite() & e.isfinite()
        same = (actual == e) | (actual.isnan() & e.isnan())
        sums.num_nan += int((actual.isnan() & wrong).sum())
        sums.num_inf += int((actual.isinf() & wrong).sum())
        d, e = d.where(finite, 0.0), e.where(e.isfinite(), 0.0)
        summed = {name: summand(d, e) for name, summand in SUMMANDS.items()}
        for name, summands in summed.items():
            of_rows[name][span] = summands.sum(1)
        of_rows["dd"][span][(~finite & ~same).any(1)] = math.nan
        if extent != "norms":
            columns = d, summed["de"], summed["ee"], summed["dd"], e
            sums.channels += torch.stack([one.sum(0) for one in columns])
        row, column = divmod(int(d.abs().argmax()), num_channels)
        size = abs(float(d[row, column]))
        if size > sums.worst.difference:
            values = float(actual[row, column]), float(e[row, column])
            sums.worst = WorstElement(size, *values, (start + row, column))
    for name, of_row in of_rows.items():
        setattr(sums, name, float(of_row.nansum() if name == "dd" else of_row.sum()))
    ee, dd, de, dede = (of_rows[name] for name in ("ee", "dd", "de", "dede"))
    scale = math.sqrt(sums.ee / num_rows)
    sums.rows = torch.stack([ee.sqrt(), dd.sqrt(), torch.full_like(ee, scale)])
    unit = scale / math.sqrt(num_channels)
    if extent != "norms" and unit > 0 and math.isfinite(unit):
        sums.bins = _sum_bins(actual_RC, expected_RC, unit, extent)
    if extent != "norms" and num_channels >= FEWEST_IN_ROW:
        usable = (ee > (ROW_FLOOR * scale) ** 2) & dd.isfinite()
        slope, variance = (de / ee)[usable], (dede / ee.square())[usable]
        parts = torch.ones_like(slope), slope, slope.square(), variance
        sums.row_slopes = torch.stack(parts).sum(1)
    return sums


def _take_masks(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pair in float64 with infinities in place of the lowest and largest numbers of masks."""
    largest = torch.finfo(actual.dtype).max if actual.is_floating_point() else math.inf
    a, e = actual.double(), expected.double()
    masked = e.abs() >= MASKED_SIZE
    if not bool(masked.any()):
        return a, e
    infinite = torch.full_like(e, torch.inf)
    a = torch.where(masked & (a.abs() >= largest / 2), infinite.copysign(a), a)
    return a, torch.where(masked, infinite.copysign(e), e)


def _sum_bins(actual_RC: Tensor, expected_RC: Tensor, unit: float, extent: Extent) -> Tensor:
    stride = min(-(-actual_RC.numel() // BINNED_ELEMENTS), LARGEST_STRIDE) | 1
    sample = actual_RC.reshape(-1)[::stride]
    actual, e = _take_masks(sample, expected_RC.reshape(-1)[::stride])
    finite = (actual - e).isfinite()
    actual, e = actual[finite], e[finite]
    d, index = (actual - e) / unit, bin_of(e, unit)
    weights = [None, d, d * d, e / unit]
    if extent == "pointwise":
        beyond = (actual - e.to(sample.dtype).double()) / unit
        weights += [beyond, beyond * beyond]
    bins = torch.zeros(6, NUM_BINS, dtype=torch.float64)
    for sums, weight in zip(bins, weights, strict=False):
        sums += torch.bincount(index, weights=weight, minlength=NUM_BINS)  # noqa: PLW2901 - a view
    return bins


def summarize(values_RC: Tensor) -> Tensor:
    """Compute `assay.kernel.summarize` by operations of torch, on the device of the values."""
    # Widened once: each operation would widen a narrow tensor again, at twice the time.
    values = values_RC.to(torch.promote_types(values_RC.dtype, torch.float32))
    low, high = torch.aminmax(values)
    norm = torch.linalg.vector_norm(values)
    num_nan = num_inf = norm.new_zeros(())
    if values.device.type != "cpu" or not math.isfinite(norm):
        num_nan, num_inf = (one.sum().to(norm.dtype) for one in (values.isnan(), values.isinf()))
    rows, channels = (_factors_on(values, dim) for dim in (0, 1))
    projection = torch.dot(values @ channels, rows)
    return torch.stack([low, high, values.mean(), norm, num_nan, num_inf, projection])


def _factors_on(values: Tensor, dim: int) -> Tensor:
    return _copied_factors(values.shape[dim], dim, values.dtype, values.device)


@lru_cache(maxsize=64)
def _copied_factors(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return factors(size, seed, dtype).to(dtype).to(device)


def sum_tokens(actual_TV: Tensor, expected_TV: Tensor, largest_T: Tensor) -> TokenSums:
    """Compute `assay.kernel.sum_tokens` by operations of torch."""
    height = max(1, _STEP_ELEMENTS // max(actual_TV.shape[1], 1))
    parts = zip(*(one.split(height) for one in (actual_TV, expected_TV, largest_T)), strict=True)
    sums = torch.cat([_sum_chunk(*part) for part in parts], 1)
    return TokenSums(*sums)


def _sum_chunk(actual_TV: Tensor, expected_TV: Tensor, largest_T: Tensor) -> Tensor:
    e = expected_TV.double()
    d = actual_TV.double() - e
    weight = (e - largest_T[:, None]).exp()
    p = weight / weight.sum(1, keepdim=True)
    mean = (p * d).sum(1, keepdim=True)
    c = d - mean
    plain = d.sum(1), (d * d).sum(1), (e * e).sum(1), (d * e).sum(1), e.sum(1), d.amin(1), d.amax(1)
    spread = (d - d.mean(1, keepdim=True)).square().sum(1)
    series = c * c / 2 * (1 + c / 3 * (1 + c / 4 * (1 + c / 5)))
    excess = torch.where(c.abs() < _SMALL_CHANGE, series, c.expm1() - c)
    fits = c.abs().amax(1) <= _LARGEST_IN_SERIES
    return torch.stack(
        [
            *plain, spread, mean[:, 0], (p * c).sum(1),
            torch.where(fits, (p * excess).sum(1), math.nan),
        ]
    )  # fmt: skip


def find_largest(values_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `assay.kernel.find_largest` by operations of torch."""
    values_TV = values_TV.double()
    values_TV = values_TV.where(~values_TV.isnan(), -math.inf)
    values, ids = values_TV.topk(min(k + 1, values_TV.shape[1]), dim=1)
    values, ids, has_ties = values[:, :k], ids[:, :k], (values.diff(dim=1) == 0).any(1)
    for row in has_ties.nonzero()[:, 0].tolist():  # of equal values, topk takes any
        enough = (values_TV[row] >= values[row, -1]).nonzero()[:, 0]
        order = values_TV[row, enough].sort(descending=True, stable=True).indices
        ids[row] = enough[order[:k]]
    return ids.contiguous(), values.contiguous()
