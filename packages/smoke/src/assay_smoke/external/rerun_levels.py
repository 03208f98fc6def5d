"""Levels that make runs: resumed ones, and one that splits the same rows another way."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import count
from math import exp, floor, inf, isfinite, log, log10, sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.dtypes import FORMATS
from assay.errors import AssayError, name_some
from assay.judge.levels import LevelResult, failed, not_compared, not_run, passed
from assay.judge.limits import load_limits
from assay.judge.wording import format_number
from assay.sites import Phase
from assay.statistics import Statistic
from assay.training.judging.free_run import relative_error_of_losses
from assay.verdicts import Diagnosis, Location, Measurement, NextStep, Ratio
from assay_smoke.external.runs import (
    Cycle,
    SavedModel,
    Spread,
    checkpoints_of,
    copy_until,
    dtypes_by_digits,
    find_split_dependence,
    is_complete,
    load_tensors,
    read_tensors,
)
from assay_smoke.external.watched_run import LoggedStep, Run
from assay_smoke.judging import failed_checkpoint

# Largest allowed difference of a resumed run, as a share of the change by training since the
# checkpoint. A run without restored moments differs by at least the whole change.
_MOST_ALLOWED = 0.25

# Losses are logged with at most float32 precision: 2^-23 is its relative spacing at powers of two.
_LOGGED = 2.0**-23

# A reason, and its diagnosis if the values tell.
_Explained = tuple[str, Diagnosis | None]

_OUTSIDE = (
    "; does anything outside of the adapter train? peft saves only what `modules_to_save` names"
)
_NEXT = (
    "from step {} on, print the numbers of the rows, norms of weights and moments, and states of random numbers in"
    " both runs. The first that differs was not restored"
)


def judge_resumption(cycle: Cycle) -> LevelResult:
    """Resume from the middle checkpoint."""
    middle = cycle.saved.get(cycle.library.resume_at)
    if middle is None or middle.problem is not None:
        return not_run("every checkpoint to resume from is absent or incomplete")
    return _resume(cycle, "resume", cycle.uninterrupted, cycle.library.resume_at)


def judge_interruption(cycle: Cycle) -> LevelResult:
    """Send SIGTERM after the first step, and resume from the checkpoint that follows."""
    library = cycle.library
    if library.on_sigterm == "nothing":
        return not_run('on_sigterm is "nothing": no checkpoint is promised')
    if not cycle.saved:
        return not_run("the uninterrupted run is not complete")
    interrupted = cycle.run("interrupted", sigterm_after=1)
    newest = max(checkpoints_of(interrupted), default=None)
    if interrupted.signalled_after is None or interrupted.signalled_after >= library.steps:
        return not_compared("training ended before SIGTERM: use more `steps`")
    if problem := _ignored_sigterm(interrupted, newest):
        reason = f"SIGTERM after step {interrupted.signalled_after}: {problem}"
        return failed_checkpoint(len(interrupted.losses), 1, reason)
    if newest is None or newest >= library.steps:
        return not_compared("no step remains after the checkpoint of SIGTERM: use more `steps`")
    return _resume(cycle, "sigterm", interrupted, newest)


def _ignored_sigterm(interrupted: Run, newest: int | None) -> str | None:
    """Describe what a run did instead of saving a checkpoint and ending, or return None.

    newest: step of its newest checkpoint.
    """
    num_logged, library = len(interrupted.losses), interrupted.library
    if interrupted.hung_in is not None:
        limit = library.end_limit_seconds
        return f"it ran on for {limit:g} s and was ended{interrupted.describe_waits()}"
    if num_logged >= library.steps:
        return "training continued to its last step"
    if newest is None or newest < num_logged:
        there = "there is none" if newest is None else f"the newest is of step {newest}"
        return f"no checkpoint holds step {num_logged}, the last one logged; {there}"
    if newest > num_logged + 1:
        return f"the newest checkpoint claims step {newest}, but step {num_logged} is the last one logged"
    return None


def _resume(cycle: Cycle, level: str, source: Run, first: int) -> LevelResult:
    """Resume from the checkpoint that `source` wrote after `first` steps, and judge that run.

    If it ends differently, the uninterrupted run is repeated to measure how far two such runs differ.
    """
    name = {"resume": "resumed", "sigterm": "after-sigterm"}[level]
    begin, last, steps = checkpoints_of(source)[first], cycle.last, cycle.library.steps
    if cycle.library.resume_in == "copy":
        begin = copy_until(first, source, replace(cycle.uninterrupted, name=name))
    run = cycle.run(name, resume_from=begin, first_step=first)
    end, compared = cycle.read_end(run), len(run.losses) + (0 if last is None else len(last.hashes))
    spread = None
    if bad_end := _find_bad_end(cycle, run, end):
        step, reason = bad_end
        found = failed_checkpoint(step, len(run.losses), reason)
    elif other := _first_other_loss(cycle, run) or _other_tensors(end, last):
        difference, diagnosis = other
        differs, spread = _measure_spread(cycle, run, begin)
        cycle.spreads[level] = spread
        if differs:
            found = _judge_spread(spread, first, compared, difference, diagnosis)
        else:
            if differs is not None:
                difference += ", although two uninterrupted runs are equal"
            difference += _describe_ends(cycle, run, begin)
            found = failed_checkpoint(first, compared, difference, diagnosis=diagnosis)
        if found.is_failed and diagnosis != "missing-reduction":
            update = {"next": [NextStep(_NEXT.format(first + 1))]}
            found.level = found.level.model_copy(update=update)
    else:
        found = passed(compared, from_step=first, bitwise=True)
    unequal, limit = (math.inf, 0.0) if spread is None else (math.nan, None)
    rows = [
        Measurement(
            level=level, module="", port="loss", phase="checkpoint", step=step, statistic="exact",
            actual=error, expected=0.0, ratio=unequal if error else 0.0, limit=limit,
        )
        for step, actual, due in _paired_losses(cycle, run)
        for error in [0.0 if is_same(actual, due) else abs(actual - due)]
    ]  # fmt: skip
    ratios = [] if spread is None else [spread.losses, spread.ends]
    rows += [one.measurement(level, "end", phase="checkpoint", step=steps) for one in ratios]
    return found.with_rows(rows)


def _paired_losses(cycle: Cycle, run: Run) -> Iterator[tuple[int, float, float]]:
    """Return step, loss and that of the uninterrupted run for each step of a resumed run."""
    whole = cycle.uninterrupted.values[run.first_step :]
    return zip(count(run.first_step + 1), run.values, whole, strict=False)


def _find_bad_end(cycle: Cycle, run: Run, end: SavedModel | None) -> tuple[int, str] | None:
    """Return step and reason if a resumed run cannot be compared to its end."""
    first, steps = run.first_step, cycle.library.steps
    if not is_complete(run) and (problem := run.describe_bad_end()):
        return first, problem
    if run.steps_made != steps:
        made = f"it made {len(run.losses)} steps instead of {run.steps_left}"
        return first, f"resumed from step {first}, {made}"
    begin, end_hashes, last = (
        None if one is None else one.hashes for one in (cycle.saved.get(first), end, cycle.last)
    )
    if end_hashes and end_hashes == begin != last:
        same = f"its checkpoint of step {steps} equals that of step {first}"
        return first, f"the resumed run changed nothing: {same}"
    if end is None or end.problem is not None or last is None:
        problem = "it wrote no last checkpoint" if end is None else end.problem
        return steps, f"the resumed run: {problem}"
    return None


def _other_tensors(end: SavedModel | None, last: SavedModel | None) -> _Explained | None:
    """Describe the tensors of a resumed run's last checkpoint that differ, or return None."""
    expected, actual = ({} if one is None else one.hashes for one in (last, end))
    different = sorted(name for name in expected if expected[name] != actual.get(name))
    words = f"{len(different)} final tensors differ: {name_some(different)}"
    return (words, "checkpoint-mismatch") if different else None


def _describe_ends(cycle: Cycle, run: Run, begin: Path) -> str:
    """Describe how far a resumed run ends from the uninterrupted one, after a semicolon; "" if that is 0 or unknown."""
    folders = [cycle.end_of(run), cycle.end_of(cycle.uninterrupted), begin]
    try:
        ends = [read_tensors(run, folder) for folder in folders if folder is not None]
    except AssayError:
        return ""
    apart = measure_apart(*ends) if len(ends) == len(folders) else inf
    if not 0 < apart < inf:
        return ""
    size = f"{apart:.2g} of" if apart < 1 else f"{apart:,.0f} times"
    return f"; the last checkpoints differ by {size} the change since step {run.first_step}"


def _measure_spread(cycle: Cycle, resumed: Run, begin: Path) -> tuple[bool | None, Spread | None]:
    """Repeat the uninterrupted run and return whether both differ, and how far."""
    repeated = cycle.made.get("repeated") or cycle.run("repeated")
    runs = {"uninterrupted": cycle.uninterrupted, "repeated": repeated, "resumed": resumed}
    folders = {name: cycle.end_of(one) for name, one in runs.items()}
    are_whole = all(one.steps_made == cycle.library.steps for one in runs.values())
    if not are_whole or None in folders.values():
        return None, None
    ends = {name: read_tensors(runs[name], folder) for name, folder in folders.items() if folder}
    if len({frozenset(end) for end in ends.values()}) > 1:
        return None, None
    losses = {name: one.values for name, one in runs.items()}
    if losses["repeated"] == losses["uninterrupted"] and all(
        one.equal(ends["repeated"][name]) for name, one in ends["uninterrupted"].items()
    ):
        return False, None
    middle = read_tensors(resumed, begin)
    is_alike = middle.keys() == ends["resumed"].keys()
    return True, measure_spread(losses, ends, middle) if is_alike else None


def _judge_spread(
    spread: Spread | None, first: int, compared: int, difference: str, diagnosis: Diagnosis | None
) -> LevelResult:
    """Judge a resumed run by the difference of two uninterrupted ones."""
    if spread is None:
        return not_compared(f"{difference}; the repeated run left nothing to compare with")
    ends, moved = spread.ends, spread.moved
    # A NaN must not pass.
    if not ends.resolution <= _MOST_ALLOWED * moved:
        return not_compared(
            f"two uninterrupted runs of one seed end {ends.expected:.2g} apart, and training"
            f" changed {moved:.2g} since the checkpoint: a loss of state would not"
            " show. Do data, their order and all random numbers depend on {seed} alone?"
        )
    for ratio in (spread.losses, ends):
        if ratio.failed:
            over = (
                f"{format_number(ratio.value)}x the difference of two uninterrupted runs of one seed"
                f" (limit {ratio.limit:g}x of {ratio.statistic})"
            )
            return failed_checkpoint(first, compared, f"{difference}: {over}", diagnosis=diagnosis)
    return passed(compared, from_step=first, bitwise=False)


def _first_other_loss(cycle: Cycle, run: Run) -> _Explained | None:
    """Describe the first loss of a resumed run that differs, or return None."""
    pairs = _paired_losses(cycle, run)
    found = next((pair for pair in pairs if not is_same(*pair[1:])), None)
    if found is None:
        return None
    step, actual, expected = found
    whole = cycle.uninterrupted.losses[run.first_step :]
    logged = zip(run.losses, whole, strict=False)
    has_other_rates = any(one.learning_rate != due.learning_rate for one, due in logged)
    diagnosis: Diagnosis | None = "checkpoint-mismatch"
    if step == run.first_step + 1:  # before any update, so other rows would explain it
        diagnosis = None
        cause = "no step precedes it since the resume: its rows, weights or random numbers differ"
        cause += "; its learning rates differ, too" * has_other_rates
        cause += f"; {cycle.narrowing}" * bool(cycle.narrowing)
        cause += _OUTSIDE * (cycle.library.checkpoints.kind == "adapter")
    elif has_other_rates:
        cause = "its learning rates differ"
    else:
        cause, diagnosis = _explain_later_loss(whole, run.losses, cycle.library.precision)
    values = f"{actual!r}, the uninterrupted run's {expected!r}"
    return f"the loss of step {step} is {values} ({cause})", diagnosis


def _explain_later_loss(
    expected: Sequence[LoggedStep], actual: Sequence[LoggedStep], precision: str | None
) -> _Explained:
    """Explain by the norms of the first step why only later losses of a resumed run differ."""
    # With logged rates, the level learning-rate judges the schedule.
    is_logged = any(one.learning_rate is not None for one in actual)
    states = ["the optimizer's state", *["the schedule"] * (not is_logged)]
    states += ["the loss scale"] * (precision == "float16")
    agrees = "the first loss after the resume agrees"
    left = "left over from earlier steps (a missing zero_grad)"
    num_steps = min(len(expected), len(actual))  # a library may log more losses than steps
    logged = _Difference(expected[:num_steps], actual[:num_steps], 0.0, num_steps)
    ratios = logged.ratios(precision or "bfloat16")
    norm = next((one for step, port, one in ratios if (step, port) == (1, "grad_norm")), None)
    if norm is None:
        cause = f"{', '.join(states)}, random numbers, later rows or gradients {left} differ"
        return f"{agrees}: {cause}", "checkpoint-mismatch"
    value, due = actual[0].grad_norm, expected[0].grad_norm
    norms = f"the norm of its gradient is {value!r}, the uninterrupted run's {due!r}"
    # A lost loss scale may overflow.
    if norm.value <= 1 or not isfinite(norm.actual):
        lost = f"probably, {' or '.join(states)} was lost"
        return f"{agrees}, and {norms}: {lost}", "checkpoint-mismatch"
    cause = f"gradients are {left}, or clipping or accumulation differs"
    return f"{agrees}, but {norms}: {cause}", "missing-reduction"


def measure_spread(
    losses: Mapping[str, Sequence[float]],
    ends: Mapping[str, Mapping[str, Tensor]],
    middle: Mapping[str, Tensor],
) -> Spread:
    """Measure a resumed run against the difference of two uninterrupted ones.

    The noise of losses is at least their logged precision. The noise of ends has no floor: a few steps
    change bfloat16 weights by about half a unit roundoff.

    losses: of all steps for `uninterrupted` and `repeated`, of the last steps for `resumed`; ends: final
        tensors of each; middle: tensors of the checkpoint.
    """
    whole, repeated, resumed = (
        list(losses[run]) for run in ("uninterrupted", "repeated", "resumed")
    )
    begin, end, limits = len(whole) - len(resumed), ends["uninterrupted"], load_limits("training")
    # Two runs may agree by chance in some steps, so the larger of both windows counts.
    noise = max(
        _LOGGED,
        relative_error_of_losses(repeated, whole),
        relative_error_of_losses(repeated[begin:], whole[begin:]),
    )
    of_losses = Ratio("loss-error", relative_error_of_losses(resumed, whole[begin:]), noise)
    resumed_end, repeated_end = (_relative_error(ends[run], end) for run in ("resumed", "repeated"))
    of_ends = Ratio("trajectory-error", resumed_end, repeated_end)
    judged = [ratio.judged(limits.of(ratio.statistic)) for ratio in (of_losses, of_ends)]
    return Spread(judged[0], judged[1], _relative_error(middle, end))


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference over that of `expected`, over all tensors together."""
    errors = [(actual[name].double() - one.double()).norm() for name, one in expected.items()]
    size = math.hypot(*(one.double().norm() for one in expected.values()))
    return math.hypot(*errors) / size if size else inf


# Limit of the ends, in units of sqrt(u), with u the unit roundoff. If rounding decides the sign of an
# element's gradient, Adam moves the element by its whole learning rate in a random direction. The share
# of such elements is proportional to u, and the norm of their updates to sqrt(u). The largest distance
# of 144 clean pairs of 6 micro models (float32, bfloat16 under autocast, bfloat16; learning rates of
# 1e-5 to 5e-3; 9 and 20 steps) was 0.21 sqrt(u) in float32 and 1.8 sqrt(u) in bfloat16. In float32,
# weight decay of 0.01 once per micro-batch gives at least 12 sqrt(u), and a lost micro-batch 3,000.
_ENDS = 3.0
# Limit of the losses. Those runs had at most 0.0066 sqrt(u) in float32 and 0.071 sqrt(u) in bfloat16.
_LOSSES = 1 / 8

# Words, statistic and limit of each logged value. A norm changes by less than its gradient, and the ends
# by what the gradients change.
_LOGGED_VALUES: dict[str, tuple[str, Statistic, float]] = {
    "loss": ("loss", "loss-error", _LOSSES),
    "grad_norm": ("norm of the gradient", "norm-error", _ENDS),
}

_PERCENTILE = 0.85

# A mean of means over unequal token counts changed a norm by 6 %. A limit below _WIDE would show it. In a single step
# it may stay below that limit too, but not below half of it, as clean norms do: the ends, by their limit, reach 7 %.
_WIDE, _SURE = 0.01, 0.5

_CHECK = "`assay smoke data --accumulation` checks the divisor."
_DIVISOR = f"Is it a mean of means over unequal token counts? {_CHECK}"
_PADDING = "Or is padding not masked? `assay smoke data --collator` checks it."
_FIRST = (
    "No update between steps precedes this loss: its rows, what the step computes of them or the logged mean depends on"
    f" the split. Are rows missing, or losses not divided? {_DIVISOR}"
)
_SAME_ROWS = " Do all ranks read the same rows? `assay smoke data --sampler` checks it."
_NORM = (
    "How gradients are summed, weighted or reduced depends on the split. Are those of a micro-batch"
    f" or rank lost? {_DIVISOR}"
)
# If token counts are equal, a wrong scale is exact to rounding: this, or two unit roundoffs. Unequal ones leave it near.
# Farther factors have likelier causes: the same rows on two ranks changed a norm by 1.5.
_EXACT, _NEAR = 1e-3, 0.1


@dataclass(frozen=True, slots=True)
class _Difference:
    """The logged values of both runs by step, and the distance of their ends by `measure_apart`."""

    expected: Sequence[LoggedStep]
    actual: Sequence[LoggedStep]
    apart: float
    steps: int
    """Number of the last step."""
    quotients: Mapping[str, float] = field(default_factory=dict)
    """By name of the parts that divide a step, their number in the actual run over that in the expected one."""

    def ratios(self, dtype: str) -> list[tuple[int, str, Ratio]]:
        """Return step, port, and error over that which rounding and logged digits explain."""
        root, found = sqrt(FORMATS[dtype].unit_roundoff), []
        logged = {
            port: [getattr(one, port) for one in (*self.expected, *self.actual)]
            for port in _LOGGED_VALUES
        }
        for step, runs in enumerate(zip(self.actual, self.expected, strict=True), 1):
            for port, (_, statistic, share) in _LOGGED_VALUES.items():
                actual, due = (getattr(one, port) for one in runs)
                if actual is not None and due is not None:
                    unit = unit_in_log(due, [one for one in logged[port] if one is not None])
                    size = abs(due) or 1.0
                    error = 0.0 if is_same(actual, due) else abs(actual - due) / size
                    ratio = Ratio(statistic, error, share * root + unit / size)
                    found.append((step, port, ratio.judged(1.0)))
        ends = Ratio("trajectory-error", self.apart, _ENDS * root).judged(1.0)
        return [*found, (self.steps, "end", ends)]

    def describe(self, dtype: str) -> tuple[int, Phase, str, Diagnosis | None] | None:
        """Find the first value that rounding in `dtype` does not explain.

        Returns: its step and phase, a description, and the diagnosis if the values tell.
        """
        found = next((one for one in self.ratios(dtype) if not one[2].value <= 1), None)
        if found is None:
            return None
        step, port, ratio = found
        limit = f"limit {ratio.expected:.2g} from rounding in {dtype}"
        if port == "end":
            words = (
                f"in {1 - _PERCENTILE:.0%} of tensors, the last checkpoints differ by at least {ratio.actual:.2g} of the"
                f" change by training: {limit}. {self._show('loss', step, dtype)}{self._explain_later(step + 1, dtype)}"
            )
            return step, "optimizer", words, None
        due, other = (getattr(run[step - 1], port) for run in (self.expected, self.actual))
        phase, cause, diagnosis = self._explain(port, step, dtype)
        words = (
            f"the {_LOGGED_VALUES[port][0]} of step {step} is {due!r}, and {other!r} with another split of the rows: relative"
            f" error {ratio.actual:.2g}, {limit}. {cause}"
        )
        return step, phase, words, diagnosis

    def _explain(self, port: str, step: int, dtype: str) -> tuple[Phase, str, Diagnosis | None]:
        """Return phase, cause and diagnosis of the first wrong value, as far as the log tells."""
        if not all(isfinite(getattr(run[step - 1], port)) for run in (self.expected, self.actual)):
            return "optimizer", "One of them is not finite.", None
        factor = self._explain_factor(port, step, dtype)
        if port == "grad_norm":
            cause, diagnosis = factor or (_NORM, "missing-reduction")
            return "backward", self._show("loss", step, dtype) + cause, diagnosis
        if step > 1:
            before = self._show(port, step - 1, dtype)
            return "optimizer", before + self._explain_later(step, dtype), None
        shown = self._show("grad_norm", 1, dtype)
        others = [one for one in self.ratios(dtype) if one[1] != "loss"]
        if shown and all(_excludes_gradient(ratio) for *_, ratio in others):
            return "forward", f"{shown}The logged loss is not the mean over all rows.", None
        rest = _PADDING + _SAME_ROWS * ("ranks" in self.quotients)
        scale = self._explain_factor("grad_norm", 1, dtype) if shown else None
        if factor is None and scale is not None and scale[1] == "loss-scale":
            factor = f"{scale[0]} {rest}", scale[1]
        later = [n for n, one, ratio in others if one == "grad_norm" and not ratio.value <= 1]
        if factor is None and later and later[0] > 1:
            shown += self._show("grad_norm", later[0], dtype)
        cause, diagnosis = factor or (f"{_FIRST} {rest}", None)
        return "forward", shown + cause, diagnosis

    def _show(self, port: str, step: int, dtype: str) -> str:
        """Return a sentence with both values of a logged value; "" if it is not logged."""
        found = (one for number, name, one in self.ratios(dtype) if (name, number) == (port, step))
        if (ratio := next(found, None)) is None:
            return ""
        due, other = (getattr(run[step - 1], port) for run in (self.expected, self.actual))
        what = f"The {_LOGGED_VALUES[port][0]} of step {step}"
        if not ratio.value <= 1:
            return f"{what} is {due!r}, and {other!r}. "
        is_wide = port == "grad_norm" and not _excludes_gradient(ratio)
        wide = ", which is too wide to exclude the gradient" * is_wide
        return f"{what} agrees within the {dtype} limit of {ratio.expected:.2g} ({due!r}, {other!r}){wide}. "

    def _explain_later(self, step: int, dtype: str) -> str:
        """Say what the logs show of the updates before `step`."""
        pairs = zip(self.expected[: step - 1], self.actual, strict=False)
        for number, (due, one) in enumerate(pairs, 1):
            if due.learning_rate != one.learning_rate:
                rates = f"is {due.learning_rate}, and {one.learning_rate}"
                return f"The learning rate of step {number} {rates}: the schedule depends on the split."
        ranks = ", or weights differ between ranks" * ("ranks" in self.quotients)
        ratios = [one for one in self.ratios(dtype) if one[1] == "grad_norm" and one[0] < step]
        if not ratios:
            return (
                f"Gradients or updates depend on the split{ranks}. A logged grad_norm would tell."
            )
        number, port, worst = max(ratios, key=lambda one: one[2].value)
        shown = self._show(port, number, dtype)
        shown += "The" if _excludes_gradient(worst) else f"{_DIVISOR} Otherwise the"
        how = "by clipping, the optimizer or the applied learning rate"
        return f"{shown} update depends on the split, such as {how}{ranks}."

    def _explain_factor(self, port: str, step: int, dtype: str) -> _Explained | None:
        """Explain a factor that is close to a quotient of numbers of parts, and give a sure diagnosis.

        Unequal token counts change every such factor alike, so the nearest is the likeliest. In 360 steps of micro:llama
        over two or four micro-batches with rows of 8 to 100 tokens, a mean of means changed losses by factors of 0.81 to
        1.33, and 90 % of norms by 0.97 to 1.93. Both runs may be the wrong one.
        """
        due, other = (getattr(run[step - 1], port) for run in (self.expected, self.actual))
        factor = log(other / due) if due and other and 0 < other / due < inf else 0.0
        near = [
            (abs(factor - sign * log(quotient)), sign, max(quotient, 1 / quotient), name)
            for name, quotient in self.quotients.items()
            for sign in (1, -1)
            if quotient != 1
        ]
        least, sign, number, _ = min(near, default=(inf, 1, 1.0, ""))
        if least >= min(abs(factor), _NEAR):
            return None
        names = " or ".join(name for distance, *_, name in near if distance == least)
        values, lost = ("losses", "rows") if port == "loss" else ("gradients", "gradients")
        how = "summed, and not divided by it" if sign == 1 else "divided by it twice"
        shown = f"The larger value is {exp(abs(factor)):.4g} times the other,"
        quotient = f"the quotient of the numbers of {names}"
        if least <= max(_EXACT, 2 * FORMATS[dtype].unit_roundoff):
            return f"{shown} as {quotient}. Their {values} are {how}.", "loss-scale"
        shown += f" close to {number:g}, {quotient}."
        if sign == 1:
            why = f"Their {values} are probably {how}, and token counts are unequal. {_CHECK}"
            return f"{shown} {why}", "loss-scale"
        why = f"Are {lost} of a micro-batch or rank lost? Otherwise their {values} are {how}."
        return f"{shown} {why}", None if port == "loss" else "missing-reduction"


def _excludes_gradient(ratio: Ratio) -> bool:
    """Return True if a ratio within its limit shows that gradients are equal."""
    return ratio.value <= _SURE and ratio.expected < _WIDE


def judge_equivalent(cycle: Cycle) -> LevelResult:
    """Train with another split of the rows and compare with the uninterrupted run."""
    library, first, last = cycle.library, cycle.uninterrupted, cycle.last
    other = library.split_otherwise()
    if other is None:
        why = "`equivalent` is []"
        if library.equivalent is None:
            why = (
                "the launch line has no {batch_size} and {accumulation} to split the rows of a step"
                " another way, and no `equivalent` is declared"
            )
        parts = "accumulation, reduction over ranks, clipping and schedule depend on the split"
        return not_run(f"{why}: it was not checked whether {parts}", unchecked=True)
    if last is None or last.problem is not None or last.not_finite:
        state = "not finite" if last is not None and last.not_finite else "absent or incomplete"
        unchecked = "it was not checked whether training depends on the split"
        return not_run(f"the last checkpoint is {state}: {unchecked}", unchecked=True)
    folder = checkpoints_of(first)[last.step]
    if dependence := find_split_dependence(folder / library.checkpoints.model):
        return not_compared(
            f"the checkpoint's configuration has {dependence}, which makes training"
            " depend on the split: train without it, or write equivalent = [] to skip this level"
        )
    run = cycle.run("equivalent", library=other)
    problem = None if is_complete(run) else run.describe_bad_end()
    end, split = cycle.end_of(run), "split by `launch` and by `equivalent`"
    if library.equivalent is None:
        words = (", ".join(f"{k} {n}" for k, n in one.split.items()) for one in (library, other))
        split = f"split by {', and by '.join(words)}"
    if problem is None and len(run.losses) != len(first.losses):
        problem = f"it logged {len(run.losses)} losses, the uninterrupted run {len(first.losses)}"
    if problem is not None or end is None:
        problem = problem or "it wrote no last checkpoint"
        return not_compared(f"the equivalent launch: {problem} ({split})")
    expected = read_tensors(run, folder)
    dtype = dtypes_by_digits(expected)[-1]
    if library.checkpoints.kind == "adapter":  # begins at random
        base = read_tensors(run, min(checkpoints_of(first).items())[1])
    else:
        base = load_tensors(first.model, dtype)
    try:
        actual = read_tensors(run, end)
    except AssayError as error:
        return not_compared(f"the equivalent launch: {error} ({split})")
    apart = measure_apart(actual, expected, base)
    quotients = _compare_splits(other.split, library.split)
    difference = _Difference(first.losses, run.losses, apart, last.step, quotients)
    # The coarser of the declared dtype and that of the checkpoints.
    dtype = max(library.precision or dtype, dtype, key=lambda name: FORMATS[name].unit_roundoff)
    rows = [
        ratio.measurement("equivalent", port, phase="optimizer", step=step)
        for step, port, ratio in difference.ratios(dtype)
    ]
    return _judge_difference(difference, dtype, split, cycle).with_rows(rows)


def _compare_splits(actual: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, float]:
    """Return the quotients of the numbers of ranks and of micro-batches, by name."""
    ranks, in_rank = (
        actual.get(name, 1) / expected.get(name, 1) for name in ("ranks", "accumulation")
    )
    named = {"ranks": ranks, "micro-batches of a rank": in_rank, "micro-batches": ranks * in_rank}
    return {
        name: quotient for name, quotient in named.items() if name == "micro-batches" or ranks != 1
    }


def _judge_difference(difference: _Difference, dtype: str, split: str, cycle: Cycle) -> LevelResult:
    *logged, (_, _, ends) = difference.ratios(dtype)
    compared, found = len(logged) + 1, difference.describe(dtype)
    if found is None:
        facts: dict[str, Any] = {"apart": difference.apart}
        if not any(port == "grad_norm" for _, port, _ in logged):
            # Adam hides such a scale from losses and checkpoints.
            reason = "no grad_norm is logged, so a wrong scale of the gradients was not checked"
            facts |= {"reason": reason, "unchecked": True}
        return passed(compared, **facts)
    step, phase, words, diagnosis = found
    reason = f"{words.removesuffix('.')} ({split})"
    if (spread := cycle.spreads.get("resume")) is not None:
        repeated = spread.ends.expected / (spread.moved or 1.0)
        noise = spread.ends.limit * repeated
        if noise > ends.expected and not ends.actual > noise:
            return not_compared(
                f"two uninterrupted runs of one seed differ by {repeated:.2g} of the change by training: do data,"
                f" their order and all random numbers depend on {{seed}} alone? The difference: {reason}"
            )
    if cycle.library.precision is None and difference.describe("bfloat16") is None:
        return not_compared(
            f"{reason}; rounding in bfloat16 would explain it: write `precision`, the narrowest"
            " format in which the library computes"
        )
    # Losses and checkpoints cannot separate gradients from updates, so the reason lists candidates.
    return failed(compared, reason, diagnosis, Location(phase=phase, step=step))


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


def is_same(actual: float, expected: float) -> bool:
    """Return True for equal values, or two NaN."""
    return actual == expected or (math.isnan(actual) and math.isnan(expected))


def unit_in_log(value: float, logged: Sequence[float]) -> float:
    """Return one unit of the last digit that a library logs of `value`, derived from all `logged`.

    Some libraries log fixed decimals, others fixed significant digits. Use the coarser of both.
    """
    digits = [Decimal(repr(one)).as_tuple() for one in logged if isfinite(one)]
    decimals = max((-int(one.exponent) for one in digits), default=0)
    significant = max((len(one.digits) for one in digits), default=1)
    leading = floor(log10(abs(value))) if value and isfinite(value) else -decimals
    return 10.0 ** max(-decimals, leading - significant + 1)
