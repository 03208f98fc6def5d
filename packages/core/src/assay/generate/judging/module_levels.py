"""The levels inputs and modules: the outputs of every stage for the reference's inputs."""

from dataclasses import dataclass, field

from assay.comparing.judge import (
    DeviceBias,
    FailedStage,
    Judged,
    describe_stages_level,
    find_nonfinite_padding,
    find_origin,
    judge_replay,
    rank_stages,
)
from assay.comparing.levels import LevelResult, describe_uncalled, level_of, list_unmatched
from assay.comparing.results import ReplayResults, read_results
from assay.errors import name_some
from assay.generate.judging.evidence import GenerateEvidence
from assay.generate.judging.heads import describe_wrong_head
from assay.generate.judging.replay_rows import drift_rows, replay_rows
from assay.generate.processes.requests import REPLAY
from assay.metrics import RowErrors
from assay.stages import Stage
from assay.statistics import SYSTEMATIC
from assay.verdicts import Level, Location, Outcome, TokenPosition, Unmatched


@dataclass(slots=True)
class ModuleLevels:
    """The levels `inputs` and `modules`, and their failed stages."""

    inputs: LevelResult
    modules: LevelResult
    ranked: list[FailedStage] = field(default_factory=list)
    """Failed stages, worst first."""
    failed: list[Judged] = field(default_factory=list)
    """Every statistic over its limit."""
    origin: FailedStage | None = None
    """The stage where the error arises."""
    nonfinite_padding: FailedStage | None = None
    """The first stage that writes NaN or infinity into padding, which no level compares."""
    unmatched: Unmatched = field(default_factory=Unmatched)
    steps: dict[Stage, int] = field(default_factory=dict)
    """For each failed stage, the first step that shows its error."""


def judge_module_levels(evidence: GenerateEvidence) -> ModuleLevels:
    """Judge every stage, and find the origin of the error among the failed ones."""
    if evidence.depth != "modules":
        reason = f"checked at level {evidence.depth}"
        return ModuleLevels(LevelResult.not_run(reason), LevelResult.not_run(reason))
    replay = read_results(evidence.candidate, REPLAY)
    noise = evidence.section.noise()
    judged, bias = judge_replay(replay, noise, evidence.limits)
    unmatched = list_unmatched(replay.unmatched_expected, replay.unmatched_actual)
    inputs = [item for item in judged if item.port.stage.phase == "inputs"]
    modules = [item for item in judged if item.port.stage.phase != "inputs"]
    ranked = rank_stages(judged)
    origin = find_origin(ranked)
    in_inputs = origin is not None and origin.stage.phase == "inputs"
    origin_of_inputs, origin_of_modules = (origin, None) if in_inputs else (None, origin)
    levels = ModuleLevels(
        LevelResult(_level(inputs, Unmatched(), origin_of_inputs, evidence), judged=inputs),
        LevelResult(
            _level(modules, unmatched, origin_of_modules, evidence),
            replay_rows(judged, noise, evidence) + drift_rows(judged, evidence),
            _notes(replay, bias),
            modules,
        ),
        ranked,
        [item for item in judged if item.failed],
        origin,
        find_nonfinite_padding(replay),
        unmatched,
        {item.stage: _first_step(item.reported, noise, evidence) for item in ranked},
    )
    if origin is not None:
        head = describe_wrong_head(origin, replay, noise)
        levels.modules.notes += [head] if head is not None else []
        levels.modules.first_bad = _first_bad_token(origin.reported, noise, evidence)
    return levels


def location_of(failed: FailedStage) -> Location:
    """Return phase and module of a stage."""
    return Location(phase=failed.stage.phase, module=failed.stage.module)


def _level(
    judged: list[Judged],
    unmatched: Unmatched,
    origin: FailedStage | None,
    evidence: GenerateEvidence,
) -> Level:
    compared = len({(item.port.module, item.port.port) for item in judged})
    deciding = origin.reported if origin is not None else None
    facts = describe_stages_level(judged, deciding) | {"limits_origin": evidence.limits.origin}
    worst = deciding.port.sums.worst if deciding is not None else None
    if worst is not None and worst.index:
        facts["worst_element"] = {
            **dict(zip(("prompt", "position", "channel"), worst.index, strict=True)),
            "actual": worst.actual,
            "expected": worst.expected,
        }
    level = level_of(compared, sum(item.failed for item in judged), facts)
    if level.verdict is Outcome.FAIL or not unmatched.expected:
        return level
    reason = f"not seen: {name_some(unmatched.expected)}"
    return Level(verdict=Outcome.NOT_COMPARED, reason=reason, compared=compared, **facts)


def _notes(replay: ReplayResults, bias: DeviceBias | None) -> list[str]:
    notes = []
    if bias is not None:
        notes.append(bias.note)
    if replay.uncalled_modules:
        notes.append(describe_uncalled(replay.uncalled_modules))
    ties = sum(port.exact.num_near_ties for port in replay.ports.values())
    if ties:
        notes.append(
            f"{ties} routing choices differ where the scores are nearly equal; their rows are left"
            " out"
        )
    return notes


def _first_step(reported: Judged, noise: ReplayResults, evidence: GenerateEvidence) -> int:
    token = _first_bad_token(reported, noise, evidence)
    return evidence.call_of(token)[1] if token is not None else 0


def _first_bad_token(
    reported: Judged, noise: ReplayResults, evidence: GenerateEvidence
) -> TokenPosition | None:
    rows = RowErrors.concatenate(reported.port.sums.rows)
    if rows.error.numel() == 0 or reported.ratio.statistic == "exact":
        prompt, position = reported.port.exact.first
        return evidence.token(prompt, position) if prompt >= 0 else None
    # A systematic error is in every row, but no row exceeds its limit.
    threshold = 0.0
    if reported.ratio.statistic not in SYSTEMATIC:
        reference = noise.ports.get((reported.port.module, reported.port.port))
        worst = reference.sums.worst_row()[0] if reference is not None else 0.0
        floor = evidence.unit_roundoff / 2
        threshold = evidence.limits.of("replay-row") * max(worst, floor)
        if not bool((~(rows.relative() <= threshold)).any()):
            threshold = reported.ratio.expected
    bad = ~(rows.relative() <= threshold) & (rows.prompt >= 0) & (rows.position >= 0)
    numbers = bad.nonzero()[:, 0].tolist()
    if not numbers:
        return None
    first = min(numbers, key=lambda i: (int(rows.position[i]), int(rows.prompt[i])))
    return evidence.token(int(rows.prompt[first]), int(rows.position[first]))
