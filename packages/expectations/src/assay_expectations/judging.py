"""Noise ratios of observations. Imports no torch.

A ratio is the error of an observation over the error of the captured run. Both errors are distances from the
yardstick, so any correct order of sums gives a ratio near 1.
Shapes: R tokens of all prompts, K kept ids and the rest, M projections.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.dtypes import float_format
from assay.judge.levels import find_worst
from assay.judge.wording import describe_error, format_against
from assay.models import RECIPES
from assay.statistics import Statistic
from assay.verdicts import Ratio
from assay_expectations.records import Distributions, Expectation, Machine, Observed, Signature

Array = NDArray[np.float64]

# From the 90 clean runs of docs/expectations.md, compared with captures on one thread with the best kernels of
# the processor: every micro model with 2 threads, eager attention, another layout of its weights, and two
# levels of vector extensions, in float32 and bfloat16.
LIMITS: dict[Statistic, float] = {"logits-error": 2.0, "logits-worst": 3.0, "logits-whole": 2.0}
# Of outputs that are not logits over the vocabulary, in the same order.
OUTPUT_LIMITS: dict[Statistic, float] = {
    "output-error": 2.0, "output-worst": 3.0, "output-whole": 2.0,
}  # fmt: skip
# The largest ratios of those runs.
LARGEST_CLEAN_RATIOS: dict[Statistic, float] = {
    "logits-error": 1.59, "logits-worst": 2.02, "logits-whole": 1.45,
}  # fmt: skip
_ORIGIN = (
    f"90 clean runs reached {LARGEST_CLEAN_RATIOS['logits-error']} pooled, {LARGEST_CLEAN_RATIOS['logits-worst']} at the"
    f" worst token and {LARGEST_CLEAN_RATIOS['logits-whole']} over the whole vocabulary"
)
_CALIBRATED_MODELS = tuple(f"micro:{name}" for name in RECIPES)
_CALIBRATED_MACHINES = tuple(
    Machine(vendor="cpu", architecture="x86_64", dtype=dtype, precision=dtype)
    for dtype in ("float32", "bfloat16")
)

# Half a unit roundoff, as for every statistic of single values (assay.noise).
_FLOOR = 0.5

_TINY = float(np.finfo(np.float64).tiny)


# The ratios of one expectation, with their limits.
Judged = Mapping[Statistic, Ratio]


def is_within_limits(judged: Judged) -> bool:
    """Return True if every ratio is within its limit. NaN is not."""
    return all(one.value <= one.limit for one in judged.values())


def values_of(judged: Judged) -> dict[Statistic, float]:
    """Return the values of the ratios."""
    return {name: one.value for name, one in judged.items()}


def describe_worst(judged: Judged, noise: str) -> str:
    """Describe the ratio that is largest relative to its limit. noise: what the error is divided by."""
    worst = find_worst(judged.values())
    ratio, limit = format_against(worst.value, worst.limit)
    return f"{describe_error(worst.statistic, worst.actual)} is {ratio}x {noise} (limit {limit}x)"


def limits_origin(model: str, machine: Machine) -> str:
    """Describe the calibration of `LIMITS` for `model` on `machine`."""
    if model in _CALIBRATED_MODELS and machine in _CALIBRATED_MACHINES:
        return _ORIGIN
    return "not calibrated for this model and device"


def limits_of(signature: Signature) -> dict[Statistic, float]:
    """Return the usual limits of the ratios of `signature`."""
    return OUTPUT_LIMITS if signature.outputs else LIMITS


def judge_by(expectation: Expectation, observed: Distributions) -> Judged:
    """Judge an observation by an expectation and its limits."""
    dtype = expectation.key.machine.dtype
    return judge_numbers(expectation.signature, observed, dtype, expectation.limits)


def judge_numbers(
    signature: Signature, observed: Distributions, dtype: str, limits: Mapping[Statistic, float]
) -> Judged:
    """Judge an observation by a signature. Arguments: as of `judge_errors`."""
    noise = errors_of(signature, signature.captured)
    return judge_errors(errors_of(signature, observed), noise, dtype, limits)


def judge_errors(
    actual: Mapping[Statistic, float],
    noise: Mapping[Statistic, float],
    dtype: str,
    limits: Mapping[Statistic, float],
) -> Judged:
    """Judge the errors of a run by those of another one.

    dtype: dtype of the run. limits: limits of the ratios, by statistic.
    """
    floor = _FLOOR * float_format(dtype).unit_roundoff
    return {
        name: Ratio(name, error, max(noise[name], floor)).judged(limits[name])
        for name, error in actual.items()
    }


def errors_of(signature: Signature, run: Distributions) -> dict[Statistic, float]:
    """Compute the error of a run relative to the yardstick, by statistic."""
    yardstick = signature.yardstick
    errors_R = relative_errors(
        tokens_of(run.log_probabilities), tokens_of(yardstick.log_probabilities)
    )
    difference_RM = tokens_of(run.projections) - tokens_of(yardstick.projections)
    spreads_R = tokens_of(signature.spreads)
    whole_R = np.sqrt(np.mean(difference_RM**2, axis=1)) / np.maximum(spreads_R, _TINY)
    errors = rms(errors_R), float(errors_R.max()), rms(whole_R)  # max propagates NaN
    return dict(zip(limits_of(signature), errors, strict=True))


def relative_errors(actual_RK: Array, expected_RK: Array) -> Array:
    """Compute each token's rms error of log-probabilities over their standard deviation.

    Shapes: both (R, K); returns (R,). Equal infinities have no error. A NaN, or an infinity on one side,
    makes the error of its token NaN or infinite.
    """
    with np.errstate(invalid="ignore"):
        difference = np.where(actual_RK == expected_RK, 0.0, actual_RK - expected_RK)
    error_R: Array = np.sqrt(np.mean(difference**2, axis=1))
    result: Array = error_R / token_spreads(expected_RK)
    return result


def token_spreads(values_RK: Array) -> Array:
    """Compute each token's standard deviation of finite values, never zero. Returns: (R,)."""
    spreads_R: Array = np.sqrt(np.nanmean(centred(values_RK) ** 2, axis=1))
    return np.maximum(spreads_R, _TINY)


def centred(values_RK: Array) -> Array:
    """Subtract each token's mean. Infinite values become NaN."""
    finite = np.where(np.isfinite(values_RK), values_RK, np.nan)
    result: Array = finite - np.nanmean(finite, axis=1, keepdims=True)
    return result


def tokens_of(batches: Sequence[Sequence[Sequence[Any]]]) -> Array:
    """Flatten batches of rows of tokens to one array of tokens, (R, ...)."""
    return np.asarray(
        [token for rows in batches for row in rows for token in row], dtype=np.float64
    )


def rms(values_R: Array) -> float:
    """Return the root mean square."""
    return math.sqrt(float(np.mean(values_R**2)))


def describe_form(signature: Signature, observed: Observed, dtype: str) -> str | None:
    """Describe another dtype of the parameters than `dtype`, or outputs that are not finite; return None without any."""
    if observed.dtype != dtype:
        return f"the model's parameters are {observed.dtype}, expected {dtype}"
    expected_RK = tokens_of(signature.yardstick.log_probabilities)
    actual_RK = tokens_of(observed.distributions.log_probabilities)
    tokens = int((~np.isfinite(actual_RK) & np.isfinite(expected_RK)).any(axis=1).sum())
    if not tokens:
        return None
    values = "the outputs" if signature.outputs else "the log-probabilities"
    return f"{values} of {tokens} of {len(actual_RK)} tokens are not finite"
