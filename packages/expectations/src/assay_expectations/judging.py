"""Numbers against an expectation: the error of what was seen, as a ratio to the captured run's.

Both errors are distances from the yardstick, so any healthy order of sums gives a ratio near 1.
Shapes: R tokens of all prompts, K kept ids and the rest.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.comparing.levels import JudgedRatio, find_worst
from assay.dtypes import float_format
from assay.noise import Ratio
from assay.verdicts import Measurement
from assay_expectations.records import Expectation, LogProbabilities, Machine

Array = NDArray[np.float64]

# The 12 clean runs of docs/expectations.md, each against a capture with AVX-512 on one thread: 2
# threads, eager attention, and four levels of vector extensions, in float32 and bfloat16. The
# largest ratios were 1.18 pooled and 1.28 at the worst token.
LIMITS: dict[str, float] = {"logits-error": 2.0, "logits-worst": 3.0}
_ORIGIN = "12 clean runs reached 1.18 pooled and 1.28 at the worst token"
_CALIBRATED_MODEL = "micro:llama"
_CALIBRATED_MACHINES = tuple(
    Machine(vendor="cpu", architecture="x86_64", dtype=dtype, precision=dtype)
    for dtype in ("float32", "bfloat16")
)

# Half a unit roundoff, as for every statistic of single values (assay.noise).
_FLOOR = 0.5


@dataclass(frozen=True, slots=True)
class JudgedSignature:
    """What was found about one expectation: one ratio for each of its limits."""

    judged: tuple[JudgedRatio, ...]
    num_tokens: int

    @property
    def worst(self) -> JudgedRatio:
        """The ratio that is furthest over its limit, or least below it."""
        return find_worst(self.judged)

    @property
    def passed(self) -> bool:
        """Whether every ratio is within its limit; a NaN is not."""
        return all(item.ratio.value <= item.limit for item in self.judged)

    def measurements(self, level: str) -> list[Measurement]:
        """One row for each statistic."""
        return [item.measurement(level, "output.logits") for item in self.judged]


def limits_origin(model: str, machine: Machine) -> str:
    """Where `LIMITS` come from for an expectation of `model` on `machine`."""
    if model == _CALIBRATED_MODEL and machine in _CALIBRATED_MACHINES:
        return _ORIGIN
    return "not calibrated for this model and device"


def judge_numbers(expectation: Expectation, seen: list[LogProbabilities]) -> JudgedSignature:
    """What was seen, judged where `expectation` was captured."""
    signature = expectation.signature
    yardstick = _rows(signature.yardstick)
    actual = relative_errors(_rows(seen), yardstick)
    noise = relative_errors(_rows(signature.captured), yardstick)
    floor = _FLOOR * float_format(expectation.key.machine.dtype).unit_roundoff
    ratios = (
        Ratio("logits-error", _rms(actual), max(_rms(noise), floor)),
        Ratio("logits-worst", _worst(actual), max(_worst(noise), floor)),
    )
    judged = tuple(JudgedRatio(ratio, expectation.limits[ratio.statistic]) for ratio in ratios)
    return JudgedSignature(judged, len(yardstick))


def relative_errors(actual_RK: Array, expected_RK: Array) -> Array:
    """For each token the rms error of its log-probabilities over their rms spread.

    Shapes: both (R, K); returns (R,). Equal infinities are no error; a NaN, or an infinity on one
    side, makes its token's error NaN or infinite.
    """
    with np.errstate(invalid="ignore"):
        difference = np.where(actual_RK == expected_RK, 0.0, actual_RK - expected_RK)
    finite = np.isfinite(expected_RK)
    count = finite.sum(axis=1, keepdims=True)
    values = np.where(finite, expected_RK, 0.0)
    mean = values.sum(axis=1, keepdims=True) / count
    spread = np.where(finite, values - mean, 0.0)
    error = np.sqrt(np.mean(difference**2, axis=1))
    scale: Array = np.sqrt((spread**2).sum(axis=1) / count[:, 0])
    result: Array = error / np.maximum(scale, np.finfo(np.float64).tiny)
    return result


def _rows(batches: list[LogProbabilities]) -> Array:
    tokens = [token for rows in batches for row in rows for token in row]
    return np.asarray(tokens, dtype=np.float64)


def _rms(values_R: Array) -> float:
    return math.sqrt(float(np.mean(values_R**2)))


def _worst(values_R: Array) -> float:
    return float(values_R.max())  # max passes a NaN on
