"""Noise ratios: by how much a candidate's error exceeds that of a healthy run in its dtype.

Each statistic is a pair of numbers of the same kind, one of the candidate and one of the noise
run (trusted device, candidate's dtype), both against the yardstick. The ratio is judged by a limit
that was calibrated for this statistic (docs/noise.md). A statistic that is not defined for a place
(too few rows, too short ones) is None there: it finds nothing and has no resolution.
"""

import math
from dataclasses import dataclass

import torch

from assay.metrics import FEWEST_IN_ROW, PairSums
from assay.statistics import Statistic

# Floors of the noise, in unit roundoffs of the values' dtype: no rounded computation can be
# required to be more accurate. Half a unit for single values; means over many values are more
# accurate, measured on trained models in bfloat16: slopes to 1/1000, bin means to 1/200.
TENSOR_FLOOR = 1 / 2
SLOPE_FLOOR = 1 / 1000
BINS_FLOOR = 1 / 200

# A slope within three standard errors of zero is chance.
SLOPE_STANDARD_ERRORS = 3.0

# Truncation loses between half a unit (large significands) and a whole one (small ones): within
# this share of the mean, ln 2 units.
TRUNCATION_SHAPE = 0.25

# Floor of the share of misrounded elements where every operation rounds by itself: an accurate
# float32 function rounded to bfloat16 misrounds under 0.01%, the wrong GELU 8.7%.
SHARE_FLOOR = 0.005


@dataclass(frozen=True, slots=True)
class Ratio:
    """One statistic at one place.

    actual, expected: error of the candidate and of the noise run, as they are judged: relative
        errors, shares of elements or divergences, of one kind for one statistic, so that
        limit * expected is the smallest that would have failed.
    """

    statistic: Statistic
    actual: float
    expected: float

    @property
    def value(self) -> float:
        """Ratio of the two errors; inf where the candidate's is not a number."""
        if math.isnan(self.actual):
            return math.inf
        if self.actual == 0:
            return 0.0
        return self.actual / self.expected if self.expected > 0 else math.inf


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of a stage's systematic error that its device's arithmetic explains.

    slope: subtracted from the error's slope; floor: smallest noise for the slope that remains.
    """

    slope: float = 0.0
    floor: float = 0.0


NO_SHARE = DeviceShare()


def tensor_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio:
    """Relative error of the whole tensor, pooled over calls; no part of it is subtracted."""
    del share
    expected = noise.relative_error if noise is not None else 0.0
    floor = TENSOR_FLOOR * unit_roundoff
    return Ratio("replay-tensor", actual.relative_error, at_least(floor, expected))


def row_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio | None:
    """Error of the worst row of each run: a fault in a few tokens is lost in the average.

    None for short rows, whose error is no average: where a sum cancels, that of one value may be
    many times the noise run's worst (scores of 8 experts from partial sums in bfloat16: 9.4 times).
    """
    del share
    if actual.channel is not None and actual.channel.shape[1] < FEWEST_IN_ROW:
        return None
    expected = noise.worst_row()[0] if noise is not None else 0.0
    floor = TENSOR_FLOOR * unit_roundoff
    return Ratio("replay-row", actual.worst_row()[0], at_least(floor, expected))


def at_least(floor: float, noise: float) -> float:
    """The noise, or `floor` where that is larger or the noise run itself is not finite."""
    return max(noise, floor) if math.isfinite(noise) else floor


def slope_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio:
    """Slope of the error on the yardstick: finds a wrong scale far below the rounding noise."""
    chance = max(sums.slope_standard_error for sums in (actual, noise) if sums is not None)
    expected = max(
        abs(noise.slope) if noise is not None else 0.0,
        SLOPE_STANDARD_ERRORS * chance,
        SLOPE_FLOOR * unit_roundoff,
        share.floor,
    )
    return Ratio("replay-slope", abs(actual.slope - share.slope), expected)


def device_share(slope: float, common: float, is_product: bool) -> DeviceShare:  # noqa: FBT001
    """The part of a stage's slope that the arithmetic of its device explains.

    common: the slope that all matrix products of the device have.
    is_product: whether the stage is one matrix product, which has this slope or none. Others may
        have it several times (attention, experts), not at all, or negated where they divide by a
        sum (norms), and a function of a product (softmax) turns it into an error of another shape:
        there an error below its size cannot be distinguished from it.
    """
    if is_product:
        low, high = sorted((1.25 * common, 0.75 * common))
        nearest = min((0.0, min(max(slope, low), high)), key=lambda share: abs(slope - share))
        return DeviceShare(nearest)
    low, high = sorted((2.0 * common, -common))
    return DeviceShare(min(max(slope, low), high), abs(common))


def bins_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio | None:
    """Mean error by size of the value: finds a function of another shape."""
    if not actual.num_used_bins:
        return None
    bias, chance = actual.bin_bias(share.slope)
    noise_bias, noise_chance = noise.bin_bias() if noise is not None else (0.0, 0.0)
    shape = TRUNCATION_SHAPE * abs(share.slope) * actual.bin_spread()
    floor = max(shape, share.floor, BINS_FLOOR * unit_roundoff)
    return Ratio("replay-bins", bias, max(noise_bias, chance, noise_chance, floor))


def row_slope_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio | None:
    """Slopes of single rows: finds a factor whose error differs from token to token.

    A root, a sum of exponentials or a scale of a quantised token in too low a precision causes one.
    """
    if not actual.num_row_slopes:
        return None
    slope, chance = actual.row_slope(share.slope)
    noise_slope, noise_chance = noise.row_slope() if noise is not None else (0.0, 0.0)
    floor = max(share.floor, BINS_FLOOR * unit_roundoff)
    return Ratio("replay-row-slope", slope, max(noise_slope, chance, noise_chance, floor))


def channel_ratio(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> Ratio | None:
    """The worst channel's slope or mean error, in standard errors of the noise run's errors.

    Returned as relative errors of a channel: the score times the noise of a channel's mean.
    """
    scale = channel_noise(actual, noise, unit_roundoff)
    if scale is None:
        return None
    score = _largest_score(actual, scale, share.slope)
    num_channels = scale.numel()
    # The largest of 2 C normal variables: sqrt(2 ln 2C) (Cramer, Mathematical Methods, 28.6).
    chance = math.sqrt(2 * math.log(2 * num_channels))
    noise_score = _largest_score(noise, scale) if noise is not None else 0.0
    unit = float(scale.mean()) / math.sqrt(max(actual.ee / actual.num_elements, 1e-300))
    unit /= math.sqrt(actual.channel_rows)
    return Ratio("replay-channel", score * unit, max(max(noise_score, chance) * unit, share.floor))


def channel_noise(
    actual: PairSums, noise: PairSums | None, unit_roundoff: float
) -> torch.Tensor | None:
    """Root mean square error of each channel in the noise run, at least half a unit, (C,)."""
    if actual.channel is None or actual.channel_scores().numel() == 0:
        return None
    floor = TENSOR_FLOOR * unit_roundoff * (actual.channel[2] / actual.channel_rows).sqrt()
    floor = floor.clamp(
        min=TENSOR_FLOOR * unit_roundoff * math.sqrt(actual.ee / actual.num_elements)
    )
    if noise is None or noise.channel is None:
        return floor
    if noise.channel.shape != actual.channel.shape:
        return None  # of a rank that holds some of the channels
    return torch.maximum(floor, (noise.channel[3] / max(noise.channel_rows, 1)).sqrt())


def _largest_score(sums: PairSums, scale: torch.Tensor, allowed: float = 0.0) -> float:
    if sums.channel is None or sums.channel_rows == 0:
        return 0.0
    d, de, ee, _, e = sums.channel
    d, de = d - allowed * e, de - allowed * ee
    rows = math.sqrt(sums.channel_rows)
    slope = de.abs() / ee.sqrt().clamp(min=1e-300) / scale.clamp(min=1e-300)
    bias = d.abs() / rows / scale.clamp(min=1e-300)
    return float(torch.maximum(slope, bias).max())


def share_ratio(actual: PairSums, noise: PairSums | None) -> Ratio:
    """Share of misrounded elements, for stages in which every operation rounds by itself."""
    expected = noise.misrounded_share if noise is not None else 0.0
    return Ratio("replay-share", actual.misrounded_share, max(expected, SHARE_FLOOR))


_RATIOS = (tensor_ratio, row_ratio, slope_ratio, bins_ratio, channel_ratio, row_slope_ratio)


def error_ratios(
    actual: PairSums,
    noise: PairSums | None,
    unit_roundoff: float,
    share: DeviceShare = NO_SHARE,
) -> list[Ratio]:
    """Every statistic of the error that is defined for these sums, by name."""
    ratios = [ratio_of(actual, noise, unit_roundoff, share) for ratio_of in _RATIOS]
    return [ratio for ratio in ratios if ratio is not None]
