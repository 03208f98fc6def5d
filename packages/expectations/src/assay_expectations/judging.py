"""Noise ratios of observations, and the verdict over the expectations of a machine. Imports no torch.

A ratio is the error of an observation over the error of the captured run. Both errors are distances from the
yardstick, so any correct order of sums gives a ratio near 1. `describe_likeness` explains wrong values by a
single change of all logits.
Shapes: R tokens of all prompts, K kept ids and the rest, M projections.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.dtypes import float_format
from assay.judge.coverage import (
    CoverageParts,
    describe_coverage,
    judge_coverage,
    list_gaps,
    notes_on_coverage,
)
from assay.judge.levels import (
    Cause,
    DecidingNumbers,
    LevelResult,
    conclude,
    deciding_numbers,
    failed,
    find_worst,
    level_of,
    not_compared,
    notes_of,
    rows_of,
)
from assay.judge.wording import describe_error, format_against
from assay.models import RECIPES
from assay.statistics import Statistic
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Location,
    Measurement,
    Outcome,
    Ratio,
    Unmatched,
    Verdict,
)
from assay_expectations.records import (
    AllSeen,
    Distributions,
    Expectation,
    Machine,
    Observed,
    Seen,
    Signature,
    machine_differences,
    value_differences,
)

Array = NDArray[np.float64]

# From the 90 clean runs of docs/expectations.md, compared with captures on one thread with the best kernels of
# the processor: every micro model with 2 threads, eager attention, another layout of its weights, and two
# levels of vector extensions, in float32 and bfloat16.
LIMITS: dict[Statistic, float] = {"logits-error": 2.0, "logits-worst": 3.0, "logits-whole": 2.0}
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
    return (
        f"{worst.statistic} is {worst.actual:.3g} = {worst.value:.3g}x {noise}"
        f" (limit {worst.limit:g}x)"
    )


def limits_origin(model: str, machine: Machine) -> str:
    """Describe the calibration of `LIMITS` for `model` on `machine`."""
    if model in _CALIBRATED_MODELS and machine in _CALIBRATED_MACHINES:
        return _ORIGIN
    return "not calibrated for this model and device"


def judge_by(expectation: Expectation, observed: Distributions) -> Judged:
    """Judge an observation by an expectation and its limits."""
    dtype = expectation.key.machine.dtype
    return judge_numbers(expectation.signature, observed, dtype, expectation.limits)


def judge_numbers(
    signature: Signature, observed: Distributions, dtype: str, limits: Mapping[Statistic, float]
) -> Judged:
    """Judge an observation by a signature.

    dtype: dtype of the run. limits: limits of the ratios, by statistic.
    """
    actual, noise = _errors(signature, observed), _errors(signature, signature.captured)
    floor = _FLOOR * float_format(dtype).unit_roundoff
    return {
        name: Ratio(name, actual[name], max(noise[name], floor)).judged(limits[name])
        for name in LIMITS
    }


def _errors(signature: Signature, run: Distributions) -> dict[Statistic, float]:
    """Compute the error of a run relative to the yardstick, by statistic."""
    yardstick = signature.yardstick
    errors_R = relative_errors(
        tokens_of(run.log_probabilities), tokens_of(yardstick.log_probabilities)
    )
    difference_RM = tokens_of(run.projections) - tokens_of(yardstick.projections)
    spreads_R = tokens_of(signature.spreads)
    whole_R = np.sqrt(np.mean(difference_RM**2, axis=1)) / np.maximum(spreads_R, _TINY)
    return {
        "logits-error": rms(errors_R),
        "logits-worst": float(errors_R.max()),  # max propagates NaN
        "logits-whole": rms(whole_R),
    }


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


def describe_likeness(
    signature: Signature, observed: Observed, dtype: str, judged: Judged
) -> str | None:
    """Describe the single change that explains the difference; return None if no known change does.

    dtype: the expected dtype.
    """
    if observed.dtype != dtype:
        return f"the model's parameters are {observed.dtype}, expected {dtype}"
    expected_RK = tokens_of(signature.yardstick.log_probabilities)
    actual_RK = tokens_of(observed.distributions.log_probabilities)
    if not np.isfinite(actual_RK[np.isfinite(expected_RK)]).all():
        tokens = int((~np.isfinite(actual_RK) & np.isfinite(expected_RK)).any(axis=1).sum())
        return f"the log-probabilities of {tokens} of {len(actual_RK)} tokens are not finite"
    most = judged["logits-error"].limit * judged["logits-error"].expected
    within = {name for name, one in judged.items() if one.value <= one.limit}
    if "logits-error" in within:
        num_kept = actual_RK.shape[1] - 1
        # Errors of single tokens have no common explanation.
        return (
            f"the {num_kept} most likely ids of each token agree; the error is in the rest of the"
            " vocabulary"
            if "logits-worst" in within
            else None
        )
    # Without the sum of all other ids, which does not scale like a logit.
    scale = _common_factor(actual_RK[:, :-1], expected_RK[:, :-1], most)
    if scale is not None:
        is_sign = abs(scale + 1) <= most
        return (
            "the logits are negated"
            if is_sign
            else f"the logits are {scale:.4g} times the expected logits"
        )
    own_RK = tokens_of(observed.most_likely)
    if rms(relative_errors(own_RK, expected_RK[:, :-1])) <= most:
        return "the probabilities are right but belong to other ids: the vocabulary is permuted"
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
    is_factor = left**0.5 <= most * max(abs(factor), 1.0) and abs(factor - 1) > most
    return factor if is_factor else None


# Level name if nothing was captured on this machine.
_NO_EXPECTATION = "expectations"
# More notes about other machines would hide failures.
_MAX_NOTES = 3


def judge_seen(
    run: str,
    expectations: Sequence[Expectation],
    here: AllSeen,
    allow_unused: Sequence[str] = (),
) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict over the observations of all expectations, and its measurements.

    Expectations of other machines are excluded.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    """
    results: dict[str, LevelResult] = {}
    elsewhere: dict[str, str] = {}
    coverages: list[Coverage] = []
    for name, expectation, seen in zip(_names(here.seen), expectations, here.seen, strict=True):
        if expectation.key.machine != here.machine:
            elsewhere[name] = _describe_elsewhere(name, expectation, seen, here)
        elif seen.observed is None:
            reason = seen.problem or f"stale, different content: {'; '.join(seen.stale)}"
            results[name] = failed(0, reason, expectation=expectation.hash, stale=bool(seen.stale))
        else:
            results[name] = _judge_one(name, expectation, seen.observed, here, run)
            if seen.usage is not None:
                parts = CoverageParts(seen.usage, seen.usage, allowed=allow_unused)
                coverages.append(judge_coverage(parts))
                _require_coverage(name, results[name], coverages[-1])
    notes = _condense(elsewhere)
    if not results:
        reason, notes = "; ".join(elsewhere.values()), []
        results[_NO_EXPECTATION] = not_compared(reason)
    return combine(
        results,
        notes,
        model={"name": ", ".join(sorted({expectation.model for expectation in expectations}))},
        reference={"run": "the captures"},
        candidate={"run": run},
        coverage=coverages[0] if len(results) == len(coverages) == 1 else None,
    )


def combine(
    results: Mapping[str, LevelResult],
    notes: Sequence[str],
    location: Location | None = None,
    **fields: Any,  # noqa: ANN401 - more fields of the verdict
) -> tuple[Verdict, list[Measurement]]:
    """Make the verdict over all levels, with `fields`, and its measurements."""
    judged = [ratio for one in results.values() for ratio in one.judged]
    numbers: DecidingNumbers = {}
    diagnosis: Diagnosis | None = None
    if judged:
        worst = find_worst(judged)
        numbers = deciding_numbers(worst, worst.resolution)
        # Only `assay check generate` can name a module.
        diagnosis = None if math.isfinite(worst.value) else "non-finite"
    unmatched = [
        name for name, one in results.items() if not one.level.compared and name != _NO_EXPECTATION
    ]
    verdict = conclude(
        results,
        Cause(diagnosis, location),
        notes=[*notes_of(results), *notes],
        unmatched=Unmatched(expected=unmatched),
        **numbers,
        **fields,
    )
    return verdict, rows_of(results)


def _judge_one(
    name: str, expectation: Expectation, observed: Observed, here: AllSeen, run: str
) -> LevelResult:
    judged = judge_by(expectation, observed.distributions)
    notes = []
    changed = value_differences(expectation.provenance.versions, here.versions)
    if changed:
        notes.append(f"{name}: changed since its capture: {', '.join(changed)}")
    reason = None
    if not is_within_limits(judged):
        reason = _describe_failure(judged, expectation, observed)
        setup = f" --candidate-setup {here.setup}" if here.setup else ""
        notes.append(
            f"to find the module: assay check generate {expectation.model}"
            f" --reference cpu/float32 --candidate {run}{setup}; if that passes, both sides share the fault, in the"
            " model's code or in assay's, and `git bisect` with this command finds the commit"
        )
    facts = {
        "limits_origin": expectation.limits_origin,
        "expectation": expectation.hash,
        "since_capture": changed,
    }
    return level_of_signature(name, expectation, judged, reason, facts, notes)


def level_of_signature(
    name: str,
    expectation: Expectation,
    judged: Judged,
    reason: str | None,
    facts: Mapping[str, Any],
    notes: Iterable[str] = (),
) -> LevelResult:
    """Make the result of the level `name`, with `facts` in the verdict."""
    ratios = tuple(judged.values())
    num_tokens = len(tokens_of(expectation.signature.spreads))
    level = level_of(num_tokens, int(not is_within_limits(judged)), {"reason": reason, **facts})
    rows = [one.measurement(name, "output.logits") for one in ratios]
    return LevelResult(level, rows, list(notes), ratios)


def _describe_failure(judged: Judged, expectation: Expectation, observed: Observed) -> str:
    worst = find_worst(judged.values())
    ratio, limit = format_against(worst.value, worst.limit)
    reason = (
        f"{describe_error(worst.statistic, worst.actual)} is {ratio}x the error of the captured run"
        f" (limit {limit}x)"
    )
    dtype = expectation.key.machine.dtype
    likeness = describe_likeness(expectation.signature, observed, dtype, judged)
    return f"{likeness}; {reason}" if likeness else reason


def _require_coverage(name: str, result: LevelResult, coverage: Coverage) -> None:
    """Change a PASS to NOT_COMPARED if part of the model did not contribute."""
    update: dict[str, object] = {"coverage": describe_coverage(coverage)}
    if coverage.forbidden_gaps and result.level.verdict is Outcome.PASS:
        reason = f"{'; '.join(list_gaps(coverage))}; --allow-unused GLOB passes without them"
        update |= {"verdict": Outcome.NOT_COMPARED, "reason": reason}
    result.level = result.level.model_copy(update=update)
    result.notes += [f"{name}: {note}" for note in notes_on_coverage(coverage)]


def _describe_elsewhere(name: str, expectation: Expectation, seen: Seen, here: AllSeen) -> str:
    """Describe an expectation of another machine, with its result here if it was observed."""
    differing = ", ".join(machine_differences(expectation.key.machine, here.machine))
    description = f"{name} belongs to another machine: {differing}"
    if seen.observed is None:
        return description
    result = describe_worst(judge_by(expectation, seen.observed.distributions), "its noise")
    return f"{description}; it is not judged here, where {result}"


def _condense(elsewhere: Mapping[str, str]) -> list[str]:
    """Return the descriptions, or a single note if there are many."""
    if len(elsewhere) <= _MAX_NOTES:
        return list(elsewhere.values())
    return [f"{len(elsewhere)} expectations belong to other machines: {', '.join(elsewhere)}"]


def _names(seen: Sequence[Seen]) -> list[str]:
    """Return the file names, or whole paths if two names are equal."""
    stems = [Path(one.file).stem for one in seen]
    unique = len(set(stems)) == len(stems)
    return stems if unique else [one.file for one in seen]
