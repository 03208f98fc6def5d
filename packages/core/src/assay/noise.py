"""Noise ratios: the candidate's error, divided by the error of a healthy run in its dtype.

Each statistic has two values, that of the candidate and that of the noise run (trusted device,
candidate's dtype). Both are errors against the yardstick. The limit of their ratio was calibrated for
the statistic (docs/noise.md). A function returns None where its statistic is undefined: too few rows, or
too short ones.
"""

import math
from dataclasses import dataclass

import torch

from assay.kernel import FEWEST_IN_ROW
from assay.metrics import PairSums
from assay.statistics import Statistic
from assay.verdicts import Ratio

# Smallest noise, in unit roundoffs of the values' dtype: no rounded computation can be required to
# be more accurate. Half a unit for single values. Means over many values are more accurate, measured
# on trained models in bfloat16: slopes to 1/1000, bin means to 1/200.
TENSOR_FLOOR = 1 / 2
SLOPE_FLOOR = 1 / 1000
BINS_FLOOR = 1 / 200

# In float32, roots and exponentials are not rounded from a wider result, and their errors are alike in all
# rows. (CUDA C++ Programming Guide, "Mathematical Functions", lists errors of up to 2 ulp, which are 4
# unit roundoffs.) Measured on correct models on an H200, in unit roundoffs: slopes of the whole tensor
# 1.8, mean errors of bins 8.1, single channels 8.1, slopes of single rows 4.2.
FLOAT32_UNIT_ROUNDOFF = 2.0**-24
FLOAT32_BIAS = 2.0
FLOAT32_ROW_BIAS = 3.0

# A slope within three standard errors of zero is chance.
SLOPE_STANDARD_ERRORS = 3.0

# The root mean square of few slopes varies more: with the limit of 2.3, one slope may be 4.1 standard errors.
SINGLE_ROW = 1.8

# Truncation loses between half a unit (large significands) and a whole one (small ones): within
# this share of the mean, ln 2 units.
TRUNCATION_SHAPE = 0.25

# Smallest noise of the share of misrounded elements in element-wise stages: an accurate float32
# function rounded to bfloat16 misrounds under 0.01%, the wrong GELU 8.7%.
SHARE_FLOOR = 0.005


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of a stage's systematic error that its device's arithmetic explains."""

    slope: float = 0.0
    """Subtracted from the slope of the error."""
    floor: float = 0.0
    """Smallest noise for the remaining slope."""


NO_SHARE = DeviceShare()

# In place of the noise run's sums where it has none: the smallest noise decides.
NO_NOISE = PairSums()


def tensor_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio:
    """Compare the relative errors of the whole tensor, pooled over calls. Ignores `share`."""
    del share
    errors = actual.relative_error, noise.relative_error
    return _ratio_of_errors("replay-tensor", *errors, unit_roundoff)


def row_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio | None:
    """Compare the errors of the worst rows: an average hides a fault in a few tokens. Ignores `share`.

    None for short rows. Their errors are not averages: after a cancellation the error of one value
    can be many times the noise run's worst (scores of 8 experts from partial sums in bfloat16: 9.4
    times).
    """
    del share
    if actual.channel is not None and actual.channel.shape[1] < FEWEST_IN_ROW:
        return None
    errors = actual.worst_row()[0], noise.worst_row()[0]
    return _ratio_of_errors("replay-row", *errors, unit_roundoff)


def _ratio_of_errors(
    statistic: Statistic, actual: float, noise: float, unit_roundoff: float
) -> Ratio:
    """Compare two relative errors by the rules of `PairSums.relative`: inf over a size of zero, nan fails."""
    return Ratio(statistic, actual, at_least(TENSOR_FLOOR * unit_roundoff, noise))


def at_least(floor: float, noise: float) -> float:
    """Return the noise, or `floor` if that is larger or the noise is not finite."""
    return max(noise, floor) if math.isfinite(noise) else floor


def error_beyond(sums: PairSums, factor: float) -> float:
    """Return the relative error of the actual values to the expected ones times `factor`."""
    squares = sums.dd - 2 * (factor - 1) * sums.de + (factor - 1) ** 2 * sums.ee
    size = factor * factor * sums.ee
    return math.sqrt(max(squares, 0.0) / size) if size else math.inf


def _function_bias(unit_roundoff: float, bias: float = FLOAT32_BIAS) -> float:
    """Return the systematic error that functions of a device may have; 0 for a narrower dtype."""
    return bias * unit_roundoff if unit_roundoff <= FLOAT32_UNIT_ROUNDOFF else 0.0


def slope_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio:
    """Compare the slopes of the errors on the yardstick: finds a wrong scale far below the noise.

    Only the noise run tells whether the errors of a channel are alike by chance: a fault makes them so too.
    """
    chance = max(actual.slope_standard_error, noise.slope_standard_error)
    expected = max(
        abs(noise.slope),
        SLOPE_STANDARD_ERRORS * chance,
        noise.slope_standard_error_by_channel,
        SLOPE_FLOOR * unit_roundoff,
        _function_bias(unit_roundoff),
        share.floor,
    )
    return Ratio("replay-slope", abs(actual.slope - share.slope), expected)


def device_share(slope: float, common: float, is_product: bool) -> DeviceShare:  # noqa: FBT001
    """Return the part of a stage's slope that the arithmetic of its device explains.

    common: the slope of all matrix products of the device.
    is_product: the stage is one matrix product, which has this slope or none. Another stage can have
        it several times (attention, experts), or negated after a division by a sum (norms). A function
        of a product (softmax) turns it into an error of another shape, so that a smaller error there
        cannot be told from it.
    """
    if is_product:
        low, high = sorted((1.25 * common, 0.75 * common))
        nearest = min((0.0, min(max(slope, low), high)), key=lambda share: abs(slope - share))
        return DeviceShare(nearest)
    low, high = sorted((2.0 * common, -common))
    return DeviceShare(min(max(slope, low), high), abs(common))


def bins_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio | None:
    """Compare the mean errors by size of the value: finds a function of another shape.

    Equal values have equal rounding errors, which do not average out. So in a stage that rounds element
    by element, the ratio is that of the errors beyond correct rounding, if that is smaller.
    """
    if not actual.num_used_bins:
        return None
    bias, chance = actual.bin_bias(share.slope)
    noise_bias, noise_chance = noise.bin_bias()
    shape = TRUNCATION_SHAPE * abs(share.slope) * actual.bin_spread()
    # A function may err in proportion to its value, and bins hold values of several times their mean.
    function = _function_bias(unit_roundoff) * max(1.0, actual.bin_spread())
    floor = max(shape, share.floor, BINS_FLOOR * unit_roundoff, function)
    chance = max(chance, noise_chance) * math.sqrt(actual.repetition)
    expected = max(noise_bias, chance, floor)
    beyond = actual.bin_bias_beyond_rounding(share.slope)
    of_noise = noise.bin_bias_beyond_rounding()
    if beyond is not None and of_noise is not None:
        bias = min(bias, expected * beyond[0] / max(beyond[1], *of_noise, floor))
    return Ratio("replay-bins", bias, expected)


def row_slope_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio | None:
    """Compare the slopes of single rows: finds a factor whose error differs between tokens.

    A cause is too low a precision in a root, a sum of exponentials or the scale of a quantized token.
    """
    if not actual.num_row_slopes:
        return None
    slope, chance = actual.row_slope(share.slope)
    noise_slope, noise_chance = noise.row_slope()
    bias_floor = _function_bias(unit_roundoff, FLOAT32_ROW_BIAS)
    floor = max(share.floor, BINS_FLOOR * unit_roundoff, bias_floor)
    num_different = actual.num_row_slopes / actual.repetition
    chance = max(chance, noise_chance) * max(1.0, SINGLE_ROW / math.sqrt(num_different))
    return Ratio("replay-row-slope", slope, max(noise_slope, chance, floor))


def channel_ratio(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> Ratio | None:
    """Compare the worst channel's slope or mean error, in standard errors of the noise run.

    Both are returned as relative errors of a channel: the score times the noise of a channel's mean.
    """
    scale = channel_noise(actual, noise, unit_roundoff)
    if scale is None or actual.channel is None:
        return None
    # The largest of 2 C normal variables: sqrt(2 ln 2C) (Cramer, Mathematical Methods, 28.6).
    chance = math.sqrt(2 * math.log(2 * scale.numel()))
    # A function may err in proportion to each channel, also where the noise of others is larger.
    function = _function_bias(unit_roundoff) * actual.channel[2].sqrt()
    scale = torch.maximum(scale, function / chance)
    score = _largest_score(actual, scale, share.slope)
    noise_score = _largest_score(noise, scale)
    unit = float(scale.mean()) / math.sqrt(max(actual.ee / actual.num_elements, 1e-300))
    unit /= math.sqrt(actual.channel_rows)
    expected = max(max(noise_score, chance) * unit, share.floor)
    return Ratio("replay-channel", score * unit, expected)


def channel_noise(actual: PairSums, noise: PairSums, unit_roundoff: float) -> torch.Tensor | None:
    """Return the root mean square error of each channel in the noise run, at least half a unit, (C,)."""
    if actual.channel is None or not actual.has_channel_statistics:
        return None
    floor = TENSOR_FLOOR * unit_roundoff * (actual.channel[2] / actual.channel_rows).sqrt()
    floor = floor.clamp(
        min=TENSOR_FLOOR * unit_roundoff * math.sqrt(actual.ee / actual.num_elements)
    )
    if noise.channel is None:
        return floor
    if noise.channel.shape != actual.channel.shape:
        return None  # the rank holds some of the channels only
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


def share_ratio(actual: PairSums, noise: PairSums) -> Ratio:
    """Compare the shares of misrounded elements of a stage that rounds element by element."""
    expected = max(noise.misrounded_share, SHARE_FLOOR)
    return Ratio("replay-share", actual.misrounded_share, expected)


# Each statistic of stages but the share, which is defined for some dtypes only.
RATIOS = (tensor_ratio, row_ratio, slope_ratio, bins_ratio, channel_ratio, row_slope_ratio)


def error_ratios(
    actual: PairSums, noise: PairSums, unit_roundoff: float, share: DeviceShare = NO_SHARE
) -> list[Ratio]:
    """Return all statistics of the error that are defined for these sums."""
    ratios = [ratio_of(actual, noise, unit_roundoff, share) for ratio_of in RATIOS]
    return [ratio for ratio in ratios if ratio is not None]
