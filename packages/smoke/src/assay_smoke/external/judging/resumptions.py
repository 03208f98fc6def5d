"""Judges resumed runs: they must reach the end of the uninterrupted run."""

import math

from assay.comparing.levels import JudgedRatio
from assay.comparing.limits import load_limits
from assay.errors import name_some
from assay.verdicts import Measurement
from assay_smoke.external.evidence import Evidence, Resumption
from assay_smoke.external.judging.judged_levels import JudgedLevel
from assay_smoke.external.running.launch import RunEvidence

# Largest allowed difference of a resumed run, as a share of the change by training since the
# checkpoint. A run without restored moments differs by at least the whole change.
_MOST_ALLOWED = 0.25


def judge_resumption(evidence: Evidence) -> JudgedLevel:
    """Judge the run that resumed from the middle checkpoint."""
    if evidence.resumption is None:
        return JudgedLevel.not_run("there is no whole checkpoint to resume from")
    return _judge_resumption(evidence.resumption, evidence)


def judge_interruption(evidence: Evidence) -> JudgedLevel:
    """Judge the checkpoint after SIGTERM and the run that resumed from it."""
    library, interrupted = evidence.library, evidence.interrupted
    if library.on_sigterm == "nothing":
        return JudgedLevel.not_run('on_sigterm is "nothing": no checkpoint is promised')
    if interrupted is None:
        return JudgedLevel.not_run("the uninterrupted run did not end well")
    if interrupted.signalled_after is None or interrupted.signalled_after >= library.steps:
        return JudgedLevel.not_compared("training ended before SIGTERM: use more `steps`")
    if problem := _ignored_sigterm(interrupted, evidence):
        reason = f"SIGTERM after step {interrupted.signalled_after}: {problem}"
        return JudgedLevel.failed_checkpoint(len(interrupted.losses), 1, reason)
    if evidence.after_sigterm is None:
        return JudgedLevel.not_compared(
            "no step remains after the checkpoint of SIGTERM: use more `steps`"
        )
    return _judge_resumption(evidence.after_sigterm, evidence)


def _ignored_sigterm(interrupted: RunEvidence, evidence: Evidence) -> str | None:
    """Describe what a run did instead of saving a checkpoint and ending, or return None."""
    num_logged, newest = len(interrupted.losses), evidence.interrupted_at
    if interrupted.hung_in is not None:
        limit = evidence.library.end_limit_seconds
        return f"it ran on for {limit:g} s and was ended{interrupted.describe_waits()}"
    if num_logged >= evidence.library.steps:
        return "training continued to its last step"
    if newest is None or newest < num_logged:
        there = "there is none" if newest is None else f"the newest is of step {newest}"
        return f"no checkpoint holds step {num_logged}, the last one logged; {there}"
    if newest > num_logged + 1:
        return f"the newest checkpoint claims step {newest}, but step {num_logged} is the last one logged"
    return None


def measure_resumption(evidence: Evidence) -> list[Measurement]:
    """Measure the losses of resumed runs and the ratios that judge them."""
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
        place = {"phase": "checkpoint", "step": evidence.library.steps}
        judged = [JudgedRatio(ratio, limits.of(ratio.statistic)) for ratio in one.ratios]
        rows += [ratio.measurement(level, "end").model_copy(update=place) for ratio in judged]
    return rows


def _judge_resumption(one: Resumption, evidence: Evidence) -> JudgedLevel:
    launch, end = one.run.launch, evidence.saved.get(evidence.library.steps)
    compared = len(one.run.losses)
    if problem := one.run.describe_bad_end():
        return JudgedLevel.failed_checkpoint(launch.first_step, compared, problem)
    if len(one.run.losses) != evidence.library.steps - launch.first_step:
        reason = (
            f"resumed from step {launch.first_step}, it made {compared} steps instead of"
            f" {evidence.library.steps - launch.first_step}"
        )
        return JudgedLevel.failed_checkpoint(launch.first_step, compared, reason)
    if one.end is None or one.end.problem is not None or end is None:
        problem = "it wrote no last checkpoint" if one.end is None else one.end.problem
        return JudgedLevel.failed_checkpoint(
            evidence.library.steps, compared, f"the resumed run: {problem}"
        )
    compared += len(end.hashes)
    different = sorted(name for name in end.hashes if end.hashes[name] != one.end.hashes.get(name))
    losses = _first_other_loss(one, evidence)
    if not different and losses is None:
        return JudgedLevel.passed(compared, from_step=launch.first_step, bitwise=True)
    reason = losses or f"{len(different)} final tensors differ: {name_some(different)}"
    if not one.repeated_differs:
        twice = (
            ", although two uninterrupted runs are equal" if one.repeated_differs is False else ""
        )
        return JudgedLevel.failed_checkpoint(launch.first_step, compared, reason + twice)
    return _judge_spread(one, compared, reason)


def _judge_spread(one: Resumption, compared: int, difference: str) -> JudgedLevel:
    limits = load_limits("training")
    if one.spread is None:
        return JudgedLevel.not_compared(
            f"{difference}; the repeated run left nothing to compare with"
        )
    allowed = limits.of(one.spread.ends.statistic) * one.spread.ends.expected
    # A NaN must not pass.
    if not allowed <= _MOST_ALLOWED * one.spread.moved:
        return JudgedLevel.not_compared(
            f"two uninterrupted runs of one seed end {one.spread.ends.expected:.2g} apart, and training"
            f" changed {one.spread.moved:.2g} since the checkpoint: a loss of state would not"
            " show. Do data, their order and all random numbers depend on {seed} alone?"
        )
    for ratio in one.ratios:
        limit = limits.of(ratio.statistic)
        if not ratio.value <= limit:
            reason = (
                f"{difference}: {ratio.value:.3g}x the difference of two uninterrupted runs of one seed"
                f" (limit {limit:g}x of {ratio.statistic})"
            )
            return JudgedLevel.failed_checkpoint(one.run.launch.first_step, compared, reason)
    return JudgedLevel.passed(compared, from_step=one.run.launch.first_step, bitwise=False)


def _first_other_loss(one: Resumption, evidence: Evidence) -> str | None:
    """Describe the first loss that differs, or return None."""
    begin = one.run.launch.first_step
    for number, (actual, expected) in enumerate(
        zip(one.run.losses, evidence.uninterrupted.losses[begin:], strict=False)
    ):
        if actual.value != expected.value:
            cause = (
                "weights, data or random numbers were not restored"
                if number == 0
                else "the first one agrees: moments, the schedule or random numbers were not restored"
            )
            return (
                f"the loss of step {begin + number + 1} is {actual.value!r}, the uninterrupted"
                f" run's {expected.value!r} ({cause})"
            )
    return None
