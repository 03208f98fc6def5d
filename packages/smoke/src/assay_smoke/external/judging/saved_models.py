"""Judges checkpoints: complete, finite, distinct, and trained where they should be."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

from assay.errors import name_some
from assay.verdicts import Location
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.evidence import Evidence
from assay_smoke.external.judging.equivalent_run import unit_in_log
from assay_smoke.external.judging.judged_levels import JudgedLevel

# Zero at the start of every adapter, so that an untrained adapter changes nothing.
_STARTS_AT_ZERO = "lora_B"

# Losses with fewer digits may be equal by rounding if all steps have the same rows.
_PRECISE = 1e-5


def judge_checkpoints(evidence: Evidence) -> JudgedLevel:
    """Judge that all expected checkpoints exist, whole, finite and distinct, and no others."""
    if not evidence.saved:
        return JudgedLevel.not_run("the uninterrupted run did not end well")
    library, saved = evidence.library, evidence.saved
    compared = sum(len(one.hashes) for one in saved.values())
    if missing := [step for step in library.kept_steps if step not in saved]:
        reason = (
            f"there is no checkpoint of step {missing[0]}: expected {_steps(library.kept_steps)}, found"
            f" {_steps(saved)}"
        )
        return JudgedLevel.failed_checkpoint(missing[0], compared, reason)
    for one in saved.values():
        if one.problem is not None or not one.hashes:
            reason = one.problem or "it holds no tensor"
            return JudgedLevel.failed_checkpoint(
                one.step, compared, f"the checkpoint of step {one.step}: {reason}"
            )
        if one.not_finite:
            names = name_some(one.not_finite)
            reason = f"the checkpoint of step {one.step} is not finite: {names}"
            location = Location(phase="checkpoint", step=one.step, parameter=one.not_finite[0])
            return JudgedLevel.failed(compared, reason, "non-finite", location)
        if emptied := _emptied(one, evidence):
            reason = f"the checkpoint of step {one.step} holds only zeros in {name_some(emptied)}"
            location = Location(phase="checkpoint", step=one.step, parameter=emptied[0])
            return JudgedLevel.failed(compared, reason, "checkpoint-mismatch", location)
    return _judge_history(evidence, compared)


def _emptied(saved: SavedModel, evidence: Evidence) -> list[str]:
    """Return the tensors of a checkpoint that are all zero and were not at the start."""
    start = evidence.start
    return [] if start is None else [name for name in saved.zero if name not in start.zero]


def _judge_history(evidence: Evidence, compared: int) -> JudgedLevel:
    """Judge that checkpoints differ, that no surplus ones remain, and that the model is unchanged."""
    library, saved = evidence.library, evidence.saved
    for earlier, later in pairwise(saved.values()):
        if earlier.hashes == later.hashes:
            reason = (
                f"the checkpoint of step {later.step} repeats the tensors of step {earlier.step}"
            )
            return JudgedLevel.failed_checkpoint(later.step, compared, reason)
    if too_many := [step for step in saved if step not in library.kept_steps]:
        reason = f"there is an unexpected checkpoint of step {too_many[0]}"
        if set(too_many) <= set(library.saved_steps):
            reason = (
                f"{len(saved)} checkpoints are kept instead of {len(library.kept_steps)}: step"
                f" {too_many[0]} still has one"
            )
        return JudgedLevel.failed_checkpoint(too_many[0], compared, reason)
    if evidence.changed_files:
        names = name_some(evidence.changed_files)
        return JudgedLevel.failed_checkpoint(
            0, compared, f"files in the folder of {{model}} changed: {names}"
        )
    return JudgedLevel.passed(compared, steps=list(saved))


def judge_updates(evidence: Evidence) -> JudgedLevel:
    """Judge that trainable parameters changed and frozen ones did not."""
    last = evidence.saved.get(evidence.library.steps)
    if last is None or not last.hashes:
        return JudgedLevel.not_run("there is no whole last checkpoint", unchecked=True)
    if (reason := _find_nothing_learned(evidence)) is not None:
        location = Location(phase="backward", step=evidence.library.steps)
        return JudgedLevel.failed(len(last.hashes), reason, "frozen-parameters", location)
    if evidence.library.checkpoints.kind == "adapter":
        return _judge_adapter(evidence)
    named = {
        pattern: {name for name in last.hashes if fnmatchcase(name, pattern)}
        for pattern in evidence.library.frozen
    }
    if unused := [pattern for pattern, names in named.items() if not names]:
        return JudgedLevel.failed(
            0, f"`frozen`: no parameter is called {unused[0]!r}", "frozen-parameters"
        )
    return _judge_movement(evidence, last, set().union(*named.values()))


def _find_nothing_learned(evidence: Evidence) -> str | None:
    """Describe losses or weights of a run that learns nothing, or None.

    Most losses are equal in all logged digits, or weights only shrink.
    """
    losses = [loss.value for loss in evidence.uninterrupted.losses]
    value, count = Counter(losses).most_common(1)[0] if losses else (0.0, 0)
    is_exact = value == 0 or unit_in_log(value, losses) <= _PRECISE * abs(value)
    if is_exact and 2 * count > len(losses) > 1:
        return (
            f"the loss of {count} of {len(losses)} steps is {value:g} in all logged digits: it does"
            " not depend on the model and the batch. Does any label remain in them?"
        )
    shrunk = [step for step, one in evidence.saved.items() if one.only_shrunk]
    if not shrunk:
        return None
    before = max((step for step in evidence.saved if step < shrunk[0]), default=0)
    return (
        f"from step {before} to step {shrunk[0]}, no element of any tensor grew: weight decay alone"
        " moves them, and all gradients are zero"
    )


def _judge_movement(evidence: Evidence, last: SavedModel, frozen: set[str]) -> JudgedLevel:
    compared = len(last.hashes)
    start = evidence.start.hashes if evidence.start is not None else {}
    if last.hashes.keys() != start.keys():
        names = name_some(sorted(last.hashes.keys() ^ start.keys()))
        reason = f"parameters differ from the model's: {names}"
        return JudgedLevel.failed(compared, reason, "weight-mismatch")
    moved = {name for name in last.hashes if last.hashes[name] != start[name]}
    still = sorted(last.hashes.keys() - frozen - moved)
    if still:
        reason = f"{len(still)} of {compared - len(frozen)} trainable tensors never moved"
        return _failed_update(evidence, compared, reason, still, "frozen-parameters")
    if wrong := sorted(frozen & moved):
        reason = f"{len(wrong)} of {len(frozen)} frozen tensors moved"
        return _failed_update(evidence, compared, reason, wrong, "optimizer-update")
    return JudgedLevel.passed(compared, frozen=len(frozen))


def _judge_adapter(evidence: Evidence) -> JudgedLevel:
    first, last = min(evidence.saved.items())[1], evidence.saved[evidence.library.steps]
    compared = len(last.hashes)
    if empty := [name for name in last.zero if _STARTS_AT_ZERO in name]:
        reason = f"{len(empty)} of {compared} tensors of the adapter are still zero"
        return _failed_update(evidence, compared, reason, empty, "adapter-mismatch")
    still = sorted(name for name in last.hashes if last.hashes[name] == first.hashes.get(name))
    if still:
        reason = f"{len(still)} of {compared} tensors of the adapter never moved"
        return _failed_update(evidence, compared, reason, still, "frozen-parameters")
    return JudgedLevel.passed(compared)


def _failed_update(
    evidence: Evidence,
    compared: int,
    reason: str,
    names: Sequence[str],
    diagnosis: Literal["frozen-parameters", "optimizer-update", "adapter-mismatch"],
) -> JudgedLevel:
    location = Location(phase="optimizer", step=evidence.library.steps, parameter=names[0])
    return JudgedLevel.failed(compared, f"{reason}: {name_some(names)}", diagnosis, location)


def _steps(steps: Iterable[int]) -> str:
    return f"steps {', '.join(map(str, steps))}"
