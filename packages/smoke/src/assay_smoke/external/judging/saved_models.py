"""Checkpoints and what goes on from them, judged: complete, trained, resumed to the same end."""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

from assay.comparing.limits import load_limits
from assay.errors import name_some
from assay.verdicts import Location, Measurement
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.evidence import Evidence, Resumption
from assay_smoke.external.judging.endings import describe_bad_end
from assay_smoke.external.judging.outcomes import JudgedLevel, failed, not_compared, not_run, passed
from assay_smoke.external.running.launches import RunEvidence

# Begins at zero in every adapter, so that an untrained one changes nothing.
_STARTS_AT_ZERO = "lora_B"

_NO_END = "the uninterrupted run did not end well"


def judge_checkpoints(evidence: Evidence) -> JudgedLevel:
    """Those that are expected are there, whole, finite, each another; the model was not touched."""
    if not evidence.saved:
        return not_run(_NO_END)
    subject, saved = evidence.subject, evidence.saved
    compared = sum(len(one.hashes) for one in saved.values())
    if missing := [step for step in subject.kept_steps if step not in saved]:
        reason = (
            f"no checkpoint of step {missing[0]}: those of {_steps(saved)} are there, those of"
            f" {_steps(subject.kept_steps)} should be"
        )
        return _failed_at(missing[0], compared, reason)
    for one in saved.values():
        if one.problem is not None or not one.hashes:
            reason = one.problem or "it holds no tensor"
            return _failed_at(one.step, compared, f"the checkpoint of step {one.step}: {reason}")
        if one.not_finite:
            names = name_some(one.not_finite)
            reason = f"the checkpoint of step {one.step} is not finite: {names}"
            location = Location(phase="checkpoint", step=one.step, parameter=one.not_finite[0])
            return failed(compared, reason, "non-finite", location)
        if emptied := _emptied(one, evidence):
            reason = f"the checkpoint of step {one.step} holds zeros only in {name_some(emptied)}"
            location = Location(phase="checkpoint", step=one.step, parameter=emptied[0])
            return failed(compared, reason, "checkpoint-mismatch", location)
    return _judge_history(evidence, compared)


def _emptied(saved: SavedModel, evidence: Evidence) -> list[str]:
    """Tensors of a checkpoint that are zero throughout, and were not when training began."""
    start = evidence.start
    return [] if start is None else [name for name in saved.zero if name not in start.zero]


def _judge_history(evidence: Evidence, compared: int) -> JudgedLevel:
    """Each checkpoint is another than the one before; no more are kept; nothing else was written."""
    subject, saved = evidence.subject, evidence.saved
    for earlier, later in pairwise(saved.values()):
        if earlier.hashes == later.hashes:
            reason = (
                f"the checkpoint of step {later.step} repeats the tensors of that of step"
                f" {earlier.step}"
            )
            return _failed_at(later.step, compared, reason)
    if too_many := [step for step in saved if step not in subject.kept_steps]:
        reason = f"there is a checkpoint of step {too_many[0]}, of which none is expected"
        if set(too_many) <= set(subject.saved_steps):
            reason = (
                f"{len(saved)} checkpoints are kept instead of {len(subject.kept_steps)}: that of"
                f" step {too_many[0]} is still there"
            )
        return _failed_at(too_many[0], compared, reason)
    if evidence.changed_files:
        names = name_some(evidence.changed_files)
        return _failed_at(0, compared, f"the folder of {{model}} was written to: {names}")
    return passed(compared, steps=list(saved))


def judge_updates(evidence: Evidence) -> JudgedLevel:
    """What trains has changed, and what is frozen has not."""
    last = evidence.saved.get(evidence.subject.steps)
    if last is None or not last.hashes:
        return not_run("there is no last checkpoint to look at")
    if evidence.subject.checkpoints.kind == "adapter":
        return _judge_adapter(evidence)
    named = {
        pattern: {name for name in last.hashes if fnmatchcase(name, pattern)}
        for pattern in evidence.subject.frozen
    }
    if unused := [pattern for pattern, names in named.items() if not names]:
        return failed(0, f"`frozen`: no parameter is called {unused[0]!r}", "frozen-parameters")
    return _judge_movement(evidence, last, set().union(*named.values()))


def _judge_movement(evidence: Evidence, last: SavedModel, frozen: set[str]) -> JudgedLevel:
    compared = len(last.hashes)
    start = evidence.start.hashes if evidence.start is not None else {}
    if last.hashes.keys() != start.keys():
        names = name_some(sorted(last.hashes.keys() ^ start.keys()))
        return failed(compared, f"other parameters than the model's: {names}", "weight-mismatch")
    moved = {name for name in last.hashes if last.hashes[name] != start[name]}
    still = sorted(last.hashes.keys() - frozen - moved)
    if still:
        reason = f"{len(still)} of {compared - len(frozen)} trainable tensors never moved"
        return _failed_update(evidence, compared, reason, still, "frozen-parameters")
    if wrong := sorted(frozen & moved):
        reason = f"{len(wrong)} of {len(frozen)} frozen tensors moved"
        return _failed_update(evidence, compared, reason, wrong, "optimizer-update")
    return passed(compared, frozen=len(frozen))


def _judge_adapter(evidence: Evidence) -> JudgedLevel:
    first, last = min(evidence.saved.items())[1], evidence.saved[evidence.subject.steps]
    compared = len(last.hashes)
    if empty := [name for name in last.zero if _STARTS_AT_ZERO in name]:
        reason = f"{len(empty)} of {compared} tensors of the adapter are still zero"
        return _failed_update(evidence, compared, reason, empty, "adapter-mismatch")
    still = sorted(name for name in last.hashes if last.hashes[name] == first.hashes.get(name))
    if still:
        reason = f"{len(still)} of {compared} tensors of the adapter never moved"
        return _failed_update(evidence, compared, reason, still, "frozen-parameters")
    return passed(compared)


def judge_resumption(evidence: Evidence) -> JudgedLevel:
    """The run that went on from the checkpoint in the middle ends as the uninterrupted one."""
    if evidence.resumption is None:
        return not_run("there is no whole checkpoint to resume from")
    return _judge_resumption(evidence.resumption, evidence)


def judge_interruption(evidence: Evidence) -> JudgedLevel:
    """SIGTERM in the middle of training gives a checkpoint that resumes to the same end."""
    subject, interrupted = evidence.subject, evidence.interrupted
    if subject.on_sigterm == "nothing":
        return not_run('on_sigterm is "nothing": no checkpoint is promised')
    if interrupted is None:
        return not_run(_NO_END)
    if interrupted.signalled_after is None or interrupted.signalled_after >= subject.steps:
        return not_compared("training ended before SIGTERM was sent: take more `steps`")
    if problem := _ignored_sigterm(interrupted, evidence):
        reason = f"SIGTERM after step {interrupted.signalled_after}: {problem}"
        return _failed_at(len(interrupted.losses), 1, reason)
    if evidence.after_sigterm is None:
        return not_compared("the checkpoint of SIGTERM leaves no step to resume: take more `steps`")
    return _judge_resumption(evidence.after_sigterm, evidence)


def _ignored_sigterm(interrupted: RunEvidence, evidence: Evidence) -> str | None:
    """What a run did instead of writing a checkpoint and ending; None if it did."""
    num_logged, newest = len(interrupted.losses), evidence.interrupted_at
    if interrupted.hung_in is not None:
        limit = evidence.subject.end_limit_seconds
        return f"it ran on for {limit:g} s and was ended{_waits(interrupted.waits)}"
    if num_logged >= evidence.subject.steps:
        return "training went on to its last step"
    if newest is None or newest < num_logged:
        there = "there is none" if newest is None else f"the newest is of step {newest}"
        return f"no checkpoint holds step {num_logged}, the last one logged; {there}"
    if newest > num_logged + 1:
        return (
            f"the newest checkpoint says that it is of step {newest}, and step {num_logged} is the"
            " last one logged"
        )
    return None


def measure_resumption(evidence: Evidence) -> list[Measurement]:
    """The losses of the resumed run beside the uninterrupted one's, and the ratios that judge them."""
    rows: list[Measurement] = []
    limits = load_limits("training")
    for level, one in (("resume", evidence.resumption), ("sigterm", evidence.after_sigterm)):
        if one is None:
            continue
        begin = one.run.launch.first_step
        pairs = zip(one.run.losses, evidence.uninterrupted.losses[begin:], strict=False)
        is_judged = not one.ratios
        for step, (actual, expected) in enumerate(pairs, begin + 1):
            same = actual.value == expected.value
            error = 0.0 if same else abs(actual.value - expected.value)
            rows.append(
                Measurement(
                    level=level, module="", port="loss", phase="checkpoint", step=step,
                    statistic="exact", actual=error, expected=0.0,
                    ratio=0.0 if same else math.inf if is_judged else math.nan,
                    limit=0.0 if is_judged else None,
                )
            )  # fmt: skip
        rows += [
            Measurement(
                level=level, module="", port="end", phase="checkpoint", step=evidence.subject.steps,
                statistic=ratio.statistic, actual=ratio.actual, expected=ratio.expected,
                ratio=ratio.value, limit=limits.of(ratio.statistic),
            )
            for ratio in one.ratios
        ]  # fmt: skip
    return rows


def _judge_resumption(one: Resumption, evidence: Evidence) -> JudgedLevel:
    launch, end = one.run.launch, evidence.saved.get(evidence.subject.steps)
    compared = len(one.run.losses)
    if problem := describe_bad_end(one.run):
        return _failed_at(launch.first_step, compared, problem)
    if len(one.run.losses) != evidence.subject.steps - launch.first_step:
        reason = (
            f"resumed from step {launch.first_step} it made {compared} steps instead of"
            f" {evidence.subject.steps - launch.first_step}"
        )
        return _failed_at(launch.first_step, compared, reason)
    if one.end is None or one.end.problem is not None or end is None:
        problem = "it wrote no last checkpoint" if one.end is None else one.end.problem
        return _failed_at(evidence.subject.steps, compared, f"the resumed run: {problem}")
    compared += len(end.hashes)
    different = sorted(name for name in end.hashes if end.hashes[name] != one.end.hashes.get(name))
    losses = _first_other_loss(one, evidence)
    if not different and losses is None:
        return passed(compared, from_step=launch.first_step, bitwise=True)
    reason = losses or f"{len(different)} tensors end elsewhere: {name_some(different)}"
    if not one.repeated_differs:
        twice = (
            ", although two uninterrupted runs are equal" if one.repeated_differs is False else ""
        )
        return _failed_at(launch.first_step, compared, reason + twice)
    return _judge_spread(one, compared, reason)


def _judge_spread(one: Resumption, compared: int, difference: str) -> JudgedLevel:
    limits = load_limits("training")
    if not one.ratios:
        return not_compared(f"{difference}; the repeated run left nothing to hold it to")
    for ratio in one.ratios:
        limit = limits.of(ratio.statistic)
        if not ratio.value <= limit:
            reason = (
                f"{difference}: {ratio.value:.3g}x what two uninterrupted runs of one seed differ by"
                f" (limit {limit:g}x of {ratio.statistic})"
            )
            return _failed_at(one.run.launch.first_step, compared, reason)
    return passed(compared, from_step=one.run.launch.first_step, bitwise=False)


def _first_other_loss(one: Resumption, evidence: Evidence) -> str | None:
    """What the first loss that differs tells; None where all agree."""
    begin = one.run.launch.first_step
    for number, (actual, expected) in enumerate(
        zip(one.run.losses, evidence.uninterrupted.losses[begin:], strict=False)
    ):
        if actual.value != expected.value:
            cause = (
                "weights, data or random numbers are not where they were"
                if number == 0
                else "the first one agrees: moments or the schedule were not restored, or random"
                " numbers"
            )
            return (
                f"the loss of step {begin + number + 1} is {actual.value!r}, the uninterrupted"
                f" run's {expected.value!r} ({cause})"
            )
    return None


def _failed_at(step: int, compared: int, reason: str) -> JudgedLevel:
    return failed(compared, reason, "checkpoint-mismatch", Location(phase="checkpoint", step=step))


def _failed_update(
    evidence: Evidence,
    compared: int,
    reason: str,
    names: Sequence[str],
    diagnosis: Literal["frozen-parameters", "optimizer-update", "adapter-mismatch"],
) -> JudgedLevel:
    location = Location(phase="optimizer", step=evidence.subject.steps, parameter=names[0])
    return failed(compared, f"{reason}: {name_some(names)}", diagnosis, location)


def _waits(places: Sequence[str]) -> str:
    return "".join(f"; {place}" for place in places)


def _steps(steps: Iterable[int]) -> str:
    return f"steps {', '.join(map(str, steps))}"
