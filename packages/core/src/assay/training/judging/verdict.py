"""Combines measured steps, losses and a checkpoint into one verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.errors import name_alike, name_some
from assay.judge.levels import (
    EXACT_NUMBERS,
    DecidingNumbers,
    DiagnosedFault,
    LevelResult,
    conclude,
    deciding_numbers,
    find_worst,
    general_resolution,
    level_at,
    list_unmatched,
    notes_of,
    rows_of,
)
from assay.judge.loaded import JudgedLoad, judge_load
from assay.judge.replays import (
    FailedStage,
    Judged,
    describe_stages_level,
    find_origin,
    list_suspects,
    rank_stages,
)
from assay.sites import Phase
from assay.statistics import GENERAL
from assay.training.judging.diagnosis import (
    diagnose_free_run,
    diagnose_replay,
    find_left_out,
    find_unexpectedly_trained,
    is_scale_removed,
    notes_on_scale,
    stands_still,
)
from assay.training.judging.evidence import (
    UPDATE_PREFIX,
    TrainEvidence,
    first_bad_step,
    location_of,
    location_of_parameter,
    measurement_of,
    notes_on_steps,
    notes_on_unmeasured,
    parameter_of,
)
from assay.training.judging.free_run import (
    find_broken_promise,
    find_unshared,
    find_wrong_masks,
    is_explained_by,
    judge_checkpoint,
    judge_losses,
    judge_replicas,
    judge_trajectory,
    notes_on_masks,
    notes_on_rounding,
    rows_of_free_run,
    trajectory_gap,
)
from assay.training.judging.judged_groups import JudgedGroup, judge_groups, list_unseen_settings
from assay.training.judging.labels import find_wrong_labels
from assay.training.protocol import COMPILE, LOSS_SCALING, PACKED, PHASE_METHODS
from assay.training.reports import TrainerReport
from assay.verdicts import (
    Level,
    Location,
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
)

_STEPS_ELSEWHERE = (
    "the optimizer holds none of the model's parameters, and they change all the same: tensors of"
    " its own, as master weights are, cannot be compared"
)

# The groups of measurements that each level judges; `modules` is split by phase.
_GROUPS_OF_LEVEL = {
    "inputs": ("modules", "stage-inputs"),
    "loss": ("stage-forward",),
    "activations": ("modules",),
    "gradients": ("recomputed", "gradients", "stage-backward", "stage-reduce", "stage-clip"),
    "updates": ("stage-optimizer",),
}
_PHASES_OF_LEVEL: dict[str, tuple[Phase, ...]] = {
    "gradients": ("backward", "reduce", "clip"),
    "updates": ("optimizer",),
}


@dataclass(frozen=True, slots=True)
class _Decision:
    """The error that decides the verdict, if any, and the statistic that the verdict reports."""

    finding: DiagnosedFault | None
    reported: Judged | None
    """Without an error, the statistic closest to its limit."""


def judge_training(evidence: TrainEvidence) -> tuple[Verdict, list[Measurement]]:
    """Judge all levels, and return the verdict with its measurements."""
    unscaled = evidence.without_loss_scale()
    if unscaled is not None:
        groups = judge_groups(unscaled)
        if is_scale_removed(unscaled, groups):
            return _judge(unscaled, groups, notes_on_scale(unscaled.report.replay.scaled_steps))
    return _judge(evidence, judge_groups(evidence), [])


def _judge(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], first_notes: list[str]
) -> tuple[Verdict, list[Measurement]]:
    models = [report.model for report in evidence.reports]
    loads = [evidence.reference.load, *(model.load for model in models)]
    load = judge_load([one for one in loads if one is not None], [one.changes for one in models])
    loss, loss_notes = judge_losses(evidence)
    trajectory = judge_trajectory(evidence)
    extra = {"loss": [loss] if loss else [], "updates": trajectory}
    replicas, checkpoint = judge_replicas(evidence), judge_checkpoint(evidence)
    causes = (replicas.cause, checkpoint.cause)
    broken = [one for one in causes if isinstance(one, DiagnosedFault)]
    all_judged = [item for group in groups.values() for item in group.judged]
    ranked = rank_stages(all_judged)
    free = [item for item in (*trajectory, *([loss] if loss else [])) if item.failed]
    decision = _decide_with_load(load, _decide(evidence, groups, ranked, broken, free))
    results = {"load": load.result} | {
        name: _judge_level(name, groups, evidence, extra.get(name, []), decision.reported)
        for name in _GROUPS_OF_LEVEL
    }
    results |= {"replicas": replicas, "checkpoint": checkpoint}
    results["loss"] = results["loss"].with_rows(rows_of_free_run(evidence), loss_notes)
    results["updates"].notes += notes_on_rounding(evidence)
    results["updates"].notes += _notes_on_hidden_updates(groups["stage-optimizer"].judged)
    updates = results["updates"]
    if updates.level.verdict is Outcome.PASS and (unseen := [*list_unseen_settings(evidence)]):
        updates.notes += unseen
        updates.level = updates.level.model_copy(update={"unchecked": True})
    results["activations"].notes += notes_on_masks(evidence)
    if _steps_elsewhere(evidence, groups["stage-optimizer"]):
        for result in (results["updates"], results["checkpoint"]):
            update = {"verdict": Outcome.NOT_COMPARED, "reason": _STEPS_ELSEWHERE}
            result.level = result.level.model_copy(update=update)
    has_failed = any(one.level.verdict is Outcome.FAIL for one in results.values())
    finding = decision.finding if has_failed else None
    if finding and finding.reason:
        result = results[level_at(finding.location)]
        update = {"verdict": Outcome.FAIL, "reason": finding.reason}
        result.level = result.level.model_copy(update=update)
    report = evidence.report
    notes = [*evidence.notes, *first_notes]
    notes += [*notes_on_steps(report), *notes_on_unmeasured(report)]
    verdict = conclude(
        results,
        finding,
        notes=dict.fromkeys([*notes, *notes_of(results)]),
        coverage=evidence.coverage,
        different_weights=report.model.weights_different,
        model=evidence.reference.model,
        reference=evidence.reference.reference,
        candidate=evidence.report.run,
        suspects=list_suspects(
            ranked,
            lambda stage: location_of(stage, all_judged, evidence.rows),
            (finding.location, decision.reported) if finding else None,
        ),
        unmatched=_unmatched(groups, evidence.report.traits.invisible_phases),
        **_decide_numbers(decision, all_judged, load),
    )
    return verdict, rows_of(results)


def _notes_on_hidden_updates(judged: Sequence[Judged]) -> list[str]:
    """Note the parameters whose update is as small as the rounding of their dtype."""
    alone = [
        item
        for item in judged
        if item.port.port.startswith(UPDATE_PREFIX) and item.statistic == GENERAL[0] and item.limit
    ]
    hidden = [item for item in alone if item.resolution >= 1]
    still = [parameter_of(item) for item in hidden if item.expected >= 1]
    notes = []
    if others := [parameter_of(item) for item in hidden if item.expected < 1]:
        notes.append(
            f"the updates of {len(others)} of {len(alone)} parameters were checked only for systematic errors,"
            f" because rounding hides others: {name_alike(others)}"
        )
    if still:
        notes.append(
            f"the updates of {len(still)} of {len(alone)} parameters were not checked, because a step is smaller"
            f" than the rounding of the weights in {hidden[0].port.dtype} (float32 or --mixed-precision checks"
            f" them): {name_alike(still)}"
        )
    return notes


def _decide_with_load(load: JudgedLoad, later: _Decision) -> _Decision:
    """Decide between errors before the first step, which come first, and later ones.

    If a stage that uses a changed weight fails, that stage decides: it shows the consequence.
    """
    if load.loading:
        return _Decision(load.loading[0], None)
    shown = later.finding is not None and later.finding.location.phase in (
        "inputs", "forward", "backward",
    )  # fmt: skip
    return _Decision(load.changed[0], None) if load.changed and not shown else later


def _steps_elsewhere(evidence: TrainEvidence, updates: JudgedGroup) -> bool:
    """Return True if the optimizer changes the model without holding any of its parameters."""
    num_foreign = len(set(evidence.report.model.not_in_optimizer))
    return num_foreign == evidence.reference.num_trainable and any(
        item.port.port.startswith(UPDATE_PREFIX) and not stands_still(item)
        for item in updates.judged
    )


def _judge_level(
    name: str,
    groups: dict[str, JudgedGroup],
    evidence: TrainEvidence,
    extra: list[Judged],
    deciding: Judged | None,
) -> LevelResult:
    chosen = [groups[group] for group in _GROUPS_OF_LEVEL[name]]
    judged = [
        item
        for group in chosen
        for item in group.judged
        if (item.port.stage.phase == "inputs") == (name == "inputs")
    ] + extra
    compared = len({(item.port.stage, item.port.module, item.port.port) for item in judged})
    facts = {"limits_origin": evidence.limits.origin} | describe_stages_level(judged, deciding)
    if name == "updates" and evidence.report.free.kept is not None:
        facts["noise_dtype"] = "float32"
    outcome, reason = _outcome_of(name, chosen, judged, evidence)
    notes = [note for group in chosen if name != "inputs" for note in group.notes]
    notes += _hidden_phases(name, evidence)
    level = Level(verdict=outcome, reason=reason, compared=compared, **facts)
    rows = [measurement_of(name, item, evidence.rows) for item in judged]
    return LevelResult(level, rows, notes, judged)


def _outcome_of(
    name: str, chosen: list[JudgedGroup], judged: list[Judged], evidence: TrainEvidence
) -> tuple[Outcome, str | None]:
    """Return the outcome of level `name`, and the reason if it is not a ratio over its limit."""
    if wrong := _reported_problem(name, chosen, evidence):
        return Outcome.FAIL, wrong
    if any(item.failed for item in judged):
        return Outcome.FAIL, None
    unapplied = evidence.report.replay.unapplied
    gap = _gap(name, chosen, evidence) or describe_unapplied(unapplied, name)
    if gap:
        return Outcome.NOT_COMPARED, gap
    hidden = _hidden_phases(name, evidence)
    if not judged:
        return Outcome.NOT_COMPARED, hidden[-1] if hidden else "nothing was compared"
    return Outcome.PASS, hidden[-1] if hidden else None


def _gap(name: str, chosen: list[JudgedGroup], evidence: TrainEvidence) -> str | None:
    """Explain why a level without errors cannot pass; None if it can."""
    report, invisible = evidence.report, evidence.report.traits.invisible_phases
    # The level `activations` names the module ports that cannot be judged.
    reported = [group for group in chosen if name != "inputs" or group.name != "modules"]
    if broken := [port for group in reported for port in group.broken]:
        return f"the noise run itself is not finite there: {name_some(broken)}"
    if name == "updates" and (gap := trajectory_gap(evidence)):
        return gap
    if name == "loss":
        is_finite = all(map(math.isfinite, evidence.reference.noise.losses))
        unknown = "" if is_finite else "losses of the noise run itself are not finite"
        if problem := evidence.reference.other_loss or unknown:
            return problem
    phases = _PHASES_OF_LEVEL.get(name, ())
    seen = {*invisible, *report.replay.seen}
    if unseen := [PHASE_METHODS[phase] for phase in phases if phase not in seen]:
        return f"never called: {', '.join(unseen)}"
    if "optimizer" in phases and "optimizer" in invisible:
        return _hidden_phases(name, evidence)[-1]
    shown = [group for group in reported if group.phase not in invisible]
    missing = [port for group in shown for port in group.unmatched_expected]
    return f"not seen: {name_some(missing)}" if missing else None


def _hidden_phases(level: str, evidence: TrainEvidence) -> list[str]:
    """Describe phases of `level` that cannot be observed. One process has nothing to reduce."""
    invisible = evidence.report.traits.invisible_phases
    return [
        f"{phase} is not visible: {invisible[phase]}"
        for phase in _PHASES_OF_LEVEL.get(level, ())
        if phase in invisible and (phase != "reduce" or evidence.on_ranks)
    ]


def _reported_problem(level: str, chosen: list[JudgedGroup], evidence: TrainEvidence) -> str | None:
    """Describe an error at `level` that only the reports of the ranks show; else return None."""
    report = evidence.report
    if level == "inputs":
        labels = find_wrong_labels(report.replay.labels)
        return find_unshared(evidence) or (labels.reason if labels else None)
    if level == "activations" and (masks := find_wrong_masks(evidence)):
        return masks.reason
    promise = find_broken_promise(evidence)
    if promise and level == level_at(promise.location):
        return promise.reason
    if level == "updates":
        left_out = find_left_out(evidence, chosen[0])
        return left_out.reason if left_out else _changed_unexpectedly(report)
    if level == "activations" and (names := report.model.adapter_start):
        return f"the adapter does not start as an adapter does: {name_some(names)}"
    return None


def _changed_unexpectedly(report: TrainerReport) -> str | None:
    if names := report.model.unexpectedly_trained:
        return f"trained, and should not be: {name_some(names)}"
    changed = [value.path for value in report.replay.changed_by_skipping]
    return f"changed by a step that was skipped: {name_some(changed)}" if changed else None


def _decide(
    evidence: TrainEvidence,
    groups: dict[str, JudgedGroup],
    ranked: list[FailedStage],
    broken: list[DiagnosedFault],
    free: list[Judged],
) -> _Decision:
    """Decide what the verdict reports; `free` holds the failed statistics of the free run."""
    if find_unshared(evidence):
        return _Decision(DiagnosedFault("inputs-differ", Location(phase="inputs")), None)
    origin = find_origin(ranked, lambda failed: first_bad_step(failed.reported, evidence.rows))
    promise = find_broken_promise(evidence)
    if promise and (origin is None or is_explained_by(origin.stage.phase, promise)):
        reported = _reported_at(promise.location, groups, origin) if origin else None
        return _Decision(promise, reported)
    if origin is not None:
        finding = diagnose_replay(evidence, groups, origin)
        reported = _reported_at(finding.location, groups, origin)
        is_there = reported.port.stage.phase == finding.location.phase
        return _Decision(finding, reported if is_there or not finding.reason else None)
    if found := _find_in_reports(evidence, groups) or next(iter(broken), None):
        return _Decision(found, None)
    if not free:
        judged = [item for group in groups.values() for item in group.judged]
        return _Decision(None, find_worst(judged) if judged else None)
    return _Decision(diagnose_free_run(evidence, free), free[0])


def _find_in_reports(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup]
) -> DiagnosedFault | None:
    """Find an error in the reports, if no measurement of the replayed steps failed."""
    if left_out := find_left_out(evidence, groups["stage-optimizer"]):
        return left_out
    if masks := find_wrong_masks(evidence):
        return masks
    names = evidence.report.model.adapter_start
    if names and not evidence.report.model.unexpectedly_trained:
        return DiagnosedFault("adapter-mismatch", location_of_parameter("forward", names[0]))
    if evidence.report.replay.changed_by_skipping:
        return DiagnosedFault("optimizer-update", Location(phase="optimizer"))
    return find_unexpectedly_trained(evidence)


def _reported_at(location: Location, groups: dict[str, JudgedGroup], origin: FailedStage) -> Judged:
    """Return the failed statistic that reports a finding: the worst at its place, if any."""
    there = rank_stages(
        item
        for group in groups.values()
        for item in group.failed
        if item.port.stage.phase == location.phase
        and location.module in (None, item.port.stage.module)
        and location.parameter in (None, parameter_of(item))
    )
    stages = {item.stage: item.reported for item in there}
    return stages.get(origin.stage) or (there[0] if there else origin).reported


def _decide_numbers(decision: _Decision, judged: list[Judged], load: JudgedLoad) -> DecidingNumbers:
    """Return the numbers of the error that decided, or of the statistic closest to its limit."""
    finding, reported = decision.finding, decision.reported
    if reported is None:
        is_exact = finding is not None and finding not in (*load.loading, *load.changed)
        return EXACT_NUMBERS if is_exact else {}
    if finding is not None:
        return deciding_numbers(reported, reported.resolution)
    others = (item for item in judged if item.port.stage.phase != "optimizer")
    return deciding_numbers(reported, general_resolution(others) or 0.0)


def _unmatched(groups: dict[str, JudgedGroup], invisible: Mapping[Phase, str]) -> Unmatched:
    expected = [
        name
        for group in groups.values()
        if group.phase not in invisible
        for name in group.unmatched_expected
    ]
    actual = [name for group in groups.values() for name in group.unmatched_actual]
    return list_unmatched(expected, actual)


# The level that reports a missing feature, and the evidence that it is missing.
_WITHOUT: Mapping[str, tuple[str, str]] = {
    PACKED: ("inputs", "no step ran rows laid end to end in one"),
    COMPILE: ("activations", "nothing was compiled"),
    LOSS_SCALING: ("gradients", "no loss was scaled"),
}


def describe_unapplied(unapplied: Sequence[str], level: str) -> str | None:
    """Explain why `level` cannot pass without these features; None if it reports none of them."""
    for feature in unapplied:
        where, done = _WITHOUT[feature]
        if where == level:
            return f"{feature} was asked for and is not applied: {done}"
    return None
