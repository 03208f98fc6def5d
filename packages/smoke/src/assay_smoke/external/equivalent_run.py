"""Trains on the same rows with another split: losses and the last checkpoint must be equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import floor, inf, isfinite, log10, sqrt

from torch import Tensor

from assay.comparing.levels import LevelResult, failed, not_compared, not_run, passed
from assay.comparing.limits import load_limits
from assay.dtypes import FORMATS
from assay.errors import AssayError
from assay.verdicts import Location, Ratio
from assay_smoke.external.checkpoints import (
    checkpoints_of,
    find_split_dependence,
    load_tensors,
    narrowest_dtype,
    read_tensors,
)
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.runs import Cycle

# Limit of the ends, in units of sqrt(u), with u the unit roundoff. If rounding decides the sign of an
# element's gradient, Adam moves the element by its whole learning rate in a random direction. The share
# of such elements is proportional to u, and the norm of their updates to sqrt(u). The largest distance
# of 144 clean pairs of 6 micro models (float32, bfloat16 under autocast, bfloat16; learning rates of
# 1e-5 to 5e-3; 9 and 20 steps) was 0.21 sqrt(u) in float32 and 1.8 sqrt(u) in bfloat16. In float32,
# weight decay of 0.01 once per micro-batch gives at least 12 sqrt(u), and a lost micro-batch 3,000.
_ENDS = 3.0
# Limit of the losses. Those runs had at most 0.0066 sqrt(u) in float32 and 0.071 sqrt(u) in bfloat16.
_LOSSES = 1 / 8

_PERCENTILE = 0.85

_FIRST = (
    "the runs take other rows, or normalize the loss differently, such as by a mean over micro-batches"
    " of unequal token counts, or update within a step"
)
_LATER = (
    "accumulation, reduction over ranks, clipping, optimizer or schedule depend on how the rows are"
    " split"
)


@dataclass(frozen=True, slots=True)
class _Difference:
    """Losses of both runs, and the distance of their ends; see `measure_apart`."""

    expected: list[float]
    actual: list[float]
    apart: float
    steps: int
    """Number of the last step."""

    def ratios(self, dtype: str) -> list[Ratio]:
        """Return each error over that which rounding and logged digits explain: of losses, then ends."""
        root = sqrt(FORMATS[dtype].unit_roundoff)
        logged = [*self.expected, *self.actual]
        ratios = [
            Ratio(
                "loss-error",
                abs(a - e) / (abs(e) or 1.0),
                _LOSSES * root + unit_in_log(e, logged) / (abs(e) or 1.0),
            )
            for a, e in zip(self.actual, self.expected, strict=True)
        ]
        return [*ratios, Ratio("trajectory-error", self.apart, _ENDS * root)]

    def describe(self, dtype: str) -> tuple[int, str] | None:
        """Find the first loss, or else the last checkpoint, that rounding in `dtype` does not explain.

        Returns: its step and a description.
        """
        *ratios, ends = self.ratios(dtype)
        for step, ratio in enumerate(ratios, 1):
            if not ratio.value <= 1:
                cause = _FIRST if step == 1 else f"the loss of step {step - 1} agrees: {_LATER}"
                words = (
                    f"the loss of step {step} is {self.expected[step - 1]!r}, and"
                    f" {self.actual[step - 1]!r} with another split of the rows; {cause}. Relative error"
                    f" {ratio.actual:.2g}, limit {ratio.expected:.2g} from rounding in {dtype}"
                )
                return step, words
        if ends.value <= 1:
            return None
        words = (
            f"the losses agree, but the last checkpoints differ by {ends.actual:.2g} of the change by"
            f" training (85th percentile of tensors; limit {ends.expected:.2g} from rounding in {dtype}):"
            f" {_LATER}"
        )
        return self.steps, words


def judge_equivalent(cycle: Cycle) -> LevelResult:
    """Train with another split of the rows and compare with the uninterrupted run."""
    other, last = cycle.library.split_otherwise(), cycle.last
    if other is None:
        return not_run(
            "the launch line has no {batch_size} and {accumulation} to split the rows of a step another"
            " way, and no `equivalent` is declared: it was not checked whether accumulation, reduction"
            " over ranks, clipping and schedule depend on the split",
            unchecked=True,
        )
    if last is None or last.problem is not None:
        return not_run(
            "the last checkpoint is absent or incomplete: it was not checked whether training depends on the"
            " split",
            unchecked=True,
        )
    folder = checkpoints_of(cycle.launch)[last.step]
    dependence = find_split_dependence(folder / cycle.library.checkpoints.model)
    if dependence is not None:
        return not_compared(
            f"the checkpoint's configuration has {dependence}, which makes training"
            " depend on the split: train without it, or write equivalent = [] to skip this level"
        )
    one, due = cycle.run("equivalent", library=other), cycle.uninterrupted.values
    problem = one.describe_bad_end()
    if problem is None and len(one.losses) != len(due):
        problem = f"it logged {len(one.losses)} losses, the uninterrupted run {len(due)}"
    end = cycle.end_of(one)
    split = _describe_split(cycle.library, other)
    if problem is not None or end is None:
        problem = problem or "it wrote no last checkpoint"
        return not_compared(f"the equivalent launch: {problem} ({split})")
    expected = read_tensors(one.launch, folder)
    dtype = narrowest_dtype(expected)
    if cycle.library.checkpoints.kind == "adapter":  # begins at random
        base = read_tensors(one.launch, min(checkpoints_of(cycle.launch).items())[1])
    else:
        base = load_tensors(cycle.launch.model, dtype)
    try:
        actual = read_tensors(one.launch, end)
    except AssayError as error:
        return not_compared(f"the equivalent launch: {error} ({split})")
    apart = measure_apart(actual, expected, base)
    difference = _Difference(due, one.values, apart, last.step)
    # The coarser of the declared dtype and that of the checkpoints.
    declared = cycle.library.precision or dtype
    dtype = max(declared, dtype, key=lambda name: FORMATS[name].unit_roundoff)
    *losses, of_ends = [ratio.judged(1.0) for ratio in difference.ratios(dtype)]
    level, phase = "equivalent", "optimizer"
    rows = [one.measurement(level, "loss", phase=phase, step=n) for n, one in enumerate(losses, 1)]
    rows.append(of_ends.measurement(level, "end", phase=phase, step=last.step))
    return _judge(difference, dtype, split, cycle).with_rows(rows)


def _judge(difference: _Difference, dtype: str, split: str, cycle: Cycle) -> LevelResult:
    compared, found = len(difference.actual) + 1, difference.describe(dtype)
    if found is None:
        return passed(compared, apart=difference.apart)
    step, words = found
    reason = f"{words} ({split})"
    resumption = cycle.resumptions.get("resume")
    if resumption is not None and resumption.spread is not None:
        repeated = resumption.spread.ends.expected / (resumption.spread.moved or 1.0)
        noise = load_limits("training").of("trajectory-error") * repeated
        ends = difference.ratios(dtype)[-1]
        if noise > ends.expected and not ends.actual > noise:
            return not_compared(
                f"{reason}; but two uninterrupted runs of one seed differ by {repeated:.2g} of that"
                " change. Do data, their order and all random numbers depend on {seed} alone?"
            )
    if cycle.library.precision is None and difference.describe("bfloat16") is None:
        return not_compared(
            f"{reason}; rounding in bfloat16 would explain it: write `precision`, the narrowest"
            " format in which the library computes"
        )
    # Losses and checkpoints cannot separate gradients from updates, so the reason lists candidates.
    location = Location(phase="forward" if step == 1 else "optimizer", step=step)
    return failed(compared, reason, location=location)


def measure_apart(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> float:
    """Measure the distance of two final states, relative to the change by training in each tensor.

    base: the tensors that training began with, or those of an early checkpoint.
    Returns: the 85th percentile over tensors; inf if the states hold different tensors, or one holds
        NaN or infinity. The gradient of up to one tensor in twelve, such as a key's bias, is only
        rounding. Its final value is arbitrary.
    """
    if not actual.keys() == expected.keys() == base.keys():
        return inf
    shares = []
    for name, one in expected.items():
        moved = float((one.double() - base[name].double()).norm())
        error = float((actual[name].double() - one.double()).norm())
        if not isfinite(error):
            return inf
        if error or moved:
            shares.append(error / moved if moved else inf)
    return sorted(shares)[int(_PERCENTILE * len(shares))] if shares else 0.0


def unit_in_log(value: float, logged: Sequence[float]) -> float:
    """Return one unit of the last digit that a library logs of `value`, derived from all `logged`.

    Some libraries log fixed decimals, others fixed significant digits. Use the coarser of both.
    """
    digits = [Decimal(repr(one)).as_tuple() for one in logged if isfinite(one)]
    decimals = max((-int(one.exponent) for one in digits), default=0)
    significant = max((len(one.digits) for one in digits), default=1)
    leading = floor(log10(abs(value))) if value and isfinite(value) else -decimals
    return 10.0 ** max(-decimals, leading - significant + 1)


def _describe_split(library: ExternalLibrary, other: ExternalLibrary) -> str:
    if library.equivalent is not None:
        return "split by `launch` and by `equivalent`"
    words = [", ".join(f"{k} {n}" for k, n in one.split.items()) for one in (library, other)]
    return f"split by {words[0]}, and by {words[1]}"
