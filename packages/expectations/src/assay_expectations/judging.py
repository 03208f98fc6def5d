"""Noise ratios of observations, and the single change of all logits that explains them. Imports no torch.

A ratio is the error of an observation over the error of the captured run. Both errors are distances from the
yardstick, so any correct order of sums gives a ratio near 1. `describe_likeness` explains wrong values by a
single change of all logits.
Shapes: R tokens of all prompts, K kept ids and the rest, M projections.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


# A single change explains an error if it leaves at most this part. 44 faults of four models, such as rotary
# frequencies 1 % off in bfloat16, left a third or more after sorting; two swapped ids of micro:gemma2 leave 0.09.
_MOST_UNEXPLAINED = 0.2
# Evidence of an error outside of the kept ids: these agree as in clean runs, and the whole vocabulary at least this
# many times worse. Clean runs reached 1.45.
_MIN_EXCESS_OF_OTHERS = 2.0

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


class _Words(NamedTuple):
    """Nouns and sentences of `describe_likeness` for one kind of output."""

    values: str
    rows: str
    agree: str
    outputs: str
    permuted: str


_LOGIT_WORDS = _Words(
    "the log-probabilities",
    "tokens",
    "the {} most likely ids of each token agree; the error is in the rest of the vocabulary",
    "logits",
    "the probabilities are right but belong to other ids: the vocabulary is permuted",
)
_OUTPUT_WORDS = _Words(
    "the outputs",
    "rows",
    "the {} largest values of each row agree; the error is in the others",
    "outputs",
    "the values are right but in other places: the channels are permuted",
)


def describe_form(signature: Signature, observed: Observed, dtype: str) -> str | None:
    """Describe another dtype of the parameters than `dtype`, or outputs that are not finite; return None without any."""
    if observed.dtype != dtype:
        return f"the model's parameters are {observed.dtype}, expected {dtype}"
    words = _words_of(signature)
    expected_RK = tokens_of(signature.yardstick.log_probabilities)
    actual_RK = tokens_of(observed.distributions.log_probabilities)
    tokens = int((~np.isfinite(actual_RK) & np.isfinite(expected_RK)).any(axis=1).sum())
    if not tokens:
        return None
    return f"{words.values} of {tokens} of {len(actual_RK)} {words.rows} are not finite"


def _words_of(signature: Signature) -> _Words:
    return _OUTPUT_WORDS if signature.outputs else _LOGIT_WORDS


def describe_likeness(
    signature: Signature, observed: Observed, dtype: str, judged: Judged
) -> str | None:
    """Describe the single change of finite outputs that explains the difference; return None if no known one does.

    dtype: the expected dtype.
    """
    words = _words_of(signature)
    expected_RK = tokens_of(signature.yardstick.log_probabilities)
    actual_RK = tokens_of(observed.distributions.log_probabilities)
    pooled, _, whole = judged.values()
    if pooled.value <= pooled.limit:
        # Errors of single rows have no common explanation.
        clean = zip(judged.values(), LARGEST_CLEAN_RATIOS.values(), strict=True)
        *kept, _ = (one.value <= largest for one, largest in clean)
        is_elsewhere = all(kept) and whole.value >= _MIN_EXCESS_OF_OTHERS * pooled.value
        return words.agree.format(actual_RK.shape[1] - 1) if is_elsewhere else None
    # Without the sum of all other ids, which does not scale like a logit. The noise has to leave it out as well: in
    # a model of nearly equal logits it is most of the spread.
    captured_RK = tokens_of(signature.captured.log_probabilities)
    noise = rms(relative_errors(captured_RK[:, :-1], expected_RK[:, :-1]))
    floor = _FLOOR * float_format(dtype).unit_roundoff
    most = pooled.limit * max(noise, floor)
    scale = _common_factor(actual_RK[:, :-1], expected_RK[:, :-1], most)
    if scale is not None:
        is_sign = abs(scale + 1) <= most
        return (
            f"the {words.outputs} are negated"
            if is_sign
            else f"the {words.outputs} are {scale:.4g} times the expected {words.outputs}"
        )
    own_RK = tokens_of(observed.most_likely)
    in_order = rms(relative_errors(own_RK, expected_RK[:, :-1]))
    by_id = rms(relative_errors(actual_RK[:, :-1], expected_RK[:, :-1]))
    if in_order <= min(most, _MOST_UNEXPLAINED * by_id):
        return words.permuted
    return None


def _common_factor(actual_RK: Array, expected_RK: Array, most: float) -> float | None:
    """Return the common factor of all logits; None if the remainder exceeds the noise."""
    actual, expected = centred(actual_RK), centred(expected_RK)
    used = np.isfinite(expected)
    square = float(np.sum(expected[used] ** 2))
    if not square:
        return None
    factor = float(np.sum(actual[used] * expected[used])) / square
    left = float(np.sum((actual - factor * expected)[used] ** 2)) / square
    explained = abs(factor - 1)
    is_factor = explained > most and left**0.5 <= min(
        most * max(abs(factor), 1.0), _MOST_UNEXPLAINED * explained
    )
    return factor if is_factor else None
