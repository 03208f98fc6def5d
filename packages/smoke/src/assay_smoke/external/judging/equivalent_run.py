"""Judges a run with another split of the same rows: its losses and last checkpoint must be equal."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import floor, isfinite, log10, sqrt

from assay.comparing.limits import load_limits
from assay.dtypes import FORMATS
from assay.noise import Ratio
from assay.verdicts import Location, Measurement
from assay_smoke.external.evidence import Evidence
from assay_smoke.external.judging.judged_levels import JudgedLevel
from assay_smoke.external.running.launch import RunEvidence

# Limit of the ends, in units of sqrt(u), with u the unit roundoff. If rounding decides the sign of an
# element's gradient, Adam moves the element by its whole learning rate in a random direction. The share
# of such elements is proportional to u, and the norm of their updates to sqrt(u). The largest distance
# of 144 clean pairs of 6 micro models (float32, bfloat16 under autocast, bfloat16; learning rates of
# 1e-5 to 5e-3; 9 and 20 steps) was 0.21 sqrt(u) in float32 and 1.8 sqrt(u) in bfloat16. In float32,
# weight decay of 0.01 once per micro-batch gives at least 12 sqrt(u), and a lost micro-batch 3,000.
_ENDS = 3.0
# Limit of the losses. Those runs had at most 0.0066 sqrt(u) in float32 and 0.071 sqrt(u) in bfloat16.
_LOSSES = 1 / 8

_FIRST = (
    "the runs take other rows, or normalize the loss differently, such as by a mean over micro-batches"
    " of unequal token counts, or update within a step"
)
_LATER = (
    "accumulation, reduction over ranks, clipping, optimizer or schedule depend on how the rows are"
    " split"
)


def judge_equivalent(evidence: Evidence) -> JudgedLevel:
    """Compare the uninterrupted run with the run that splits the same rows another way."""
    one = evidence.equivalent
    if evidence.library.split_otherwise() is None:
        return JudgedLevel.not_run(
            "the launch line has no {batch_size} and {accumulation} to split the rows of a step another"
            " way, and no `equivalent` is declared: it was not checked whether accumulation, reduction"
            " over ranks, clipping and schedule depend on the split",
            unchecked=True,
        )
    if evidence.split_dependence is not None:
        return JudgedLevel.not_compared(
            f"the checkpoint's configuration has {evidence.split_dependence}, which makes training"
            " depend on the split: train without it, or write equivalent = [] to skip this level"
        )
    if one is None:
        return JudgedLevel.not_run(
            "there is no whole last checkpoint: it was not checked whether training depends on the"
            " split",
            unchecked=True,
        )
    if evidence.apart is None:
        problem = one.describe_bad_end() or _describe_missing(one, evidence)
        return JudgedLevel.not_compared(
            f"the equivalent launch: {problem} ({_describe_split(evidence)})"
        )
    return _judge(one, evidence.apart, evidence)


def measure_equivalent(evidence: Evidence) -> list[Measurement]:
    """Measure the errors of the equivalent run relative to rounding."""
    one = evidence.equivalent
    if one is None or evidence.apart is None:
        return []
    ratios = list(enumerate(_ratios_of_losses(one, evidence, _dtype(evidence)), 1))
    ratios.append((evidence.library.steps, _ratio_of_ends(evidence.apart, _dtype(evidence))))
    return [
        Measurement(
            level="equivalent", module="", port="loss" if ratio.statistic == "loss-error" else "end",
            phase="optimizer", step=step, statistic=ratio.statistic, actual=ratio.actual,
            expected=ratio.expected, ratio=ratio.value, limit=1.0,
        )
        for step, ratio in ratios
    ]  # fmt: skip


def _judge(one: RunEvidence, apart: float, evidence: Evidence) -> JudgedLevel:
    difference = _find_difference(one, apart, evidence, _dtype(evidence))
    if difference is None:
        return JudgedLevel.passed(len(one.losses) + 1, apart=apart)
    step, words = difference
    reason = f"{words} ({_describe_split(evidence)})"
    spread = evidence.resumption.spread if evidence.resumption is not None else None
    if spread is not None:
        repeated = spread.ends.expected / (spread.moved or 1.0)
        noise = load_limits("training").of("trajectory-error") * repeated
        if noise > _ratio_of_ends(apart, _dtype(evidence)).expected and not apart > noise:
            return JudgedLevel.not_compared(
                f"{reason}; but two uninterrupted runs of one seed differ by {repeated:.2g} of that"
                " change. Do data, their order and all random numbers depend on {seed} alone?"
            )
    undeclared = evidence.library.precision is None
    if undeclared and _find_difference(one, apart, evidence, "bfloat16") is None:
        return JudgedLevel.not_compared(
            f"{reason}; rounding in bfloat16 would explain it: write `precision`, the narrowest"
            " format in which the library computes"
        )
    # Losses and checkpoints cannot separate gradients from updates, so the reason lists candidates.
    location = Location(phase="forward" if step == 1 else "optimizer", step=step)
    return JudgedLevel.failed(len(one.losses) + 1, reason, location=location)


def _describe_missing(one: RunEvidence, evidence: Evidence) -> str:
    """Describe what a run that ended well lacks for a comparison."""
    logged, due = len(one.losses), len(evidence.uninterrupted.losses)
    if logged != due:
        return f"it logged {logged} losses, the uninterrupted run {due}"
    return evidence.equivalent_problem or "it wrote no last checkpoint"


def _find_difference(
    one: RunEvidence, apart: float, evidence: Evidence, dtype: str
) -> tuple[int, str] | None:
    """Find the first loss, or else the last checkpoint, that rounding in `dtype` does not explain.

    Returns: its step and a description.
    """
    pairs = zip(evidence.uninterrupted.losses, one.losses, strict=True)
    ratios = _ratios_of_losses(one, evidence, dtype)
    for step, ((expected, actual), ratio) in enumerate(zip(pairs, ratios, strict=True), 1):
        if not ratio.value <= 1:
            cause = _FIRST if step == 1 else f"the loss of step {step - 1} agrees: {_LATER}"
            words = (
                f"the loss of step {step} is {expected.value!r}, and {actual.value!r} with another split"
                f" of the rows; {cause}. Relative error {ratio.actual:.2g}, limit"
                f" {ratio.expected:.2g} from rounding in {dtype}"
            )
            return step, words
    ends = _ratio_of_ends(apart, dtype)
    if ends.value <= 1:
        return None
    words = (
        f"the losses agree, but the last checkpoints differ by {ends.actual:.2g} of the change by"
        f" training (85th percentile of tensors; limit {ends.expected:.2g} from rounding in {dtype}):"
        f" {_LATER}"
    )
    return evidence.library.steps, words


def _ratios_of_losses(one: RunEvidence, evidence: Evidence, dtype: str) -> list[Ratio]:
    """Return each loss's relative error over the error that rounding and logged digits explain."""
    expected = [loss.value for loss in evidence.uninterrupted.losses]
    actual = [loss.value for loss in one.losses]
    units = [unit_in_log(value, [*expected, *actual]) for value in expected]
    rounding = _LOSSES * _root_of_roundoff(dtype)
    return [
        Ratio("loss-error", abs(a - e) / (abs(e) or 1.0), rounding + unit / (abs(e) or 1.0))
        for a, e, unit in zip(actual, expected, units, strict=True)
    ]


def _ratio_of_ends(apart: float, dtype: str) -> Ratio:
    return Ratio("trajectory-error", apart, _ENDS * _root_of_roundoff(dtype))


def _root_of_roundoff(dtype: str) -> float:
    return sqrt(FORMATS[dtype].unit_roundoff)


def _dtype(evidence: Evidence) -> str:
    """Return the coarser of the declared dtype and that of the checkpoints."""
    named = {evidence.dtype, evidence.library.precision or evidence.dtype}
    return max(named, key=lambda name: FORMATS[name].unit_roundoff)


def unit_in_log(value: float, logged: Sequence[float]) -> float:
    """Return one unit of the last digit that a library logs of `value`, derived from all `logged`.

    Some libraries log fixed decimals, others fixed significant digits. Use the coarser of both.
    """
    digits = [Decimal(repr(one)).as_tuple() for one in logged if isfinite(one)]
    decimals = max((-int(one.exponent) for one in digits), default=0)
    significant = max((len(one.digits) for one in digits), default=1)
    leading = floor(log10(abs(value))) if value and isfinite(value) else -decimals
    return 10.0 ** max(-decimals, leading - significant + 1)


def _describe_split(evidence: Evidence) -> str:
    other = evidence.library.split_otherwise()
    if other is None or evidence.library.equivalent is not None:
        return "split by `launch` and by `equivalent`"
    return f"split by {_in_words(evidence.library.split)}, and by {_in_words(other.split)}"


def _in_words(split: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in split.items())
