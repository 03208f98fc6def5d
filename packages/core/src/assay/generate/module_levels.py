"""The levels inputs and modules: the outputs of every stage for the reference's inputs.

Shapes: C channels of all heads, H heads, D channels of one head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from assay.errors import name_some
from assay.generate.golden import GenerateEvidence
from assay.judge.levels import LevelResult, describe_uncalled, level_of, list_unmatched, not_run
from assay.judge.replays import (
    DeviceBias,
    FailedStage,
    Judged,
    describe_stages_level,
    find_nonfinite_padding,
    find_origin,
    judge_replay,
    rank_stages,
)
from assay.judge.results import PortResult, ReplayResults
from assay.judge.token_rows import TokenPort, TokenRows
from assay.metrics import RowErrors
from assay.sites import holds_heads
from assay.stages import Stage
from assay.statistics import OF_INTEGERS, SYSTEMATIC
from assay.verdicts import Level, Location, Measurement, Outcome, TokenPosition, Unmatched

# If one head is wrong, it has nearly all of the excess error; with two wrong heads neither has.
_OWN_SHARE = 0.9


def describe_wrong_head(
    origin: FailedStage, candidate: ReplayResults, noise: ReplayResults
) -> str | None:
    """Name the one wrong head of the stage `origin`; None if there is not exactly one."""
    ports = [port for port in candidate.ports.values() if port.stage == origin.stage]
    width = _width_of_heads(ports)
    if width is None:
        return None
    for port in ports:
        reference = noise.ports.get((port.module, port.port))
        actual, expected = _squares(port), _squares(reference)
        if actual is None or len(actual) <= width or len(actual) % width:
            continue
        if expected is not None and expected.shape == actual.shape:
            actual = (actual - expected).clamp(min=0)
        excess_H = actual.unflatten(0, (-1, width)).sum(1)
        worst = int(excess_H.argmax())
        if float(excess_H[worst]) > _OWN_SHARE * float(excess_H.sum()):
            return f"the error of {origin.stage} is in head {worst} of {len(excess_H)}"
    return None


def _width_of_heads(ports: Iterable[PortResult]) -> int | None:
    """Return D, read from the cache entries of the stage, (..., D); None without a cache."""
    for port in ports:
        if holds_heads(port.port) and port.sums.channel is not None:
            return int(port.sums.channel.shape[1])
    return None


def _squares(port: PortResult | None) -> Tensor | None:
    """Return the sum of squared errors of each channel, (C,)."""
    if port is None or port.sums.channel is None:
        return None
    squares: Tensor = port.sums.channel[3]
    return squares


def replay_rows(
    judged: list[Judged], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    """List every judged statistic, and for every stage and token the worst of its ports."""
    rows = [item.measurement(_level_of(item.port), **item.port.place) for item in judged]
    ports = {(item.port.module, item.port.port): item.port for item in judged}
    return rows + _token_rows(ports, noise, evidence)


def _token_rows(
    ports: dict[tuple[str, str], PortResult], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    floor = evidence.unit_roundoff / 2
    measured = []
    for key, port in ports.items():
        known = noise.ports.get(key)
        rows = known.sums.rows if known is not None else []
        measured.append(TokenPort(port, rows, floor, {"level": _level_of(port), **port.place}))
    return list(TokenRows(measured, lambda *token: evidence.call_of(evidence.token(*token))[1]))


def drift_rows(judged: list[Judged], evidence: GenerateEvidence) -> list[Measurement]:
    """List the error that accumulates along the depth in a forced run, of both runs."""
    if "drift" not in evidence.candidate.attachments:
        return []
    actual: dict[str, float] = evidence.candidate.attachment_json("drift")  # type: ignore[assignment]
    noise: dict[str, float] = evidence.section.trace.attachment_json("noise-drift")  # type: ignore[assignment]
    floor = evidence.unit_roundoff / 2
    order: dict[str, int] = {}
    for item in judged:
        order.setdefault(item.port.stage.module, item.port.order)
    return [
        Measurement(
            level="modules", module=module, port="output", order=order[module],
            statistic="accumulated", actual=error, expected=noise[module],
            ratio=error / max(noise[module], floor),
        )
        for module, error in actual.items()
        if module in order and module in noise
    ]  # fmt: skip


def _level_of(port: PortResult) -> str:
    return "inputs" if port.stage.phase == "inputs" else "modules"


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
    if evidence.check.level != "modules":
        reason = f"checked at level {evidence.check.level}"
        return ModuleLevels(not_run(reason), not_run(reason))
    replay, noise = evidence.replay, evidence.noise
    judged, bias = judge_replay(replay, noise, evidence.limits)
    # What the noise run cannot read, such as a cache, has no yardstick.
    expected = list(dict.fromkeys([*replay.unmatched_expected, *noise.unmatched_expected]))
    unmatched = list_unmatched(expected, replay.unmatched_actual)
    inputs = [item for item in judged if _level_of(item.port) == "inputs"]
    modules = [item for item in judged if _level_of(item.port) == "modules"]
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
    if token is None:
        return 0
    return evidence.call_of_module(reported.port.stage.module, token)[1]


def _first_bad_token(
    reported: Judged, noise: ReplayResults, evidence: GenerateEvidence
) -> TokenPosition | None:
    rows = RowErrors.concatenate(reported.port.sums.rows)
    if rows.error.numel() == 0 or reported.statistic in OF_INTEGERS:
        prompt, position = reported.port.exact.first
        return evidence.token(prompt, position) if prompt >= 0 else None
    # A systematic error is in every row, but no row exceeds its limit.
    threshold = 0.0
    if reported.statistic not in SYSTEMATIC:
        reference = noise.ports.get((reported.port.module, reported.port.port))
        worst = reference.sums.worst_row()[0] if reference is not None else 0.0
        floor = evidence.unit_roundoff / 2
        threshold = evidence.limits.of("replay-row") * max(worst, floor)
        if not bool((~(rows.relative() <= threshold)).any()):
            threshold = reported.expected
    bad = ~(rows.relative() <= threshold) & (rows.position >= 0)
    of_prompts = bad & (rows.prompt >= 0)
    numbers = (of_prompts if bool(of_prompts.any()) else bad).nonzero()[:, 0].tolist()
    if not numbers:
        return None
    first = min(numbers, key=lambda i: (int(rows.position[i]), int(rows.prompt[i])))
    prompt, position = int(rows.prompt[first]), int(rows.position[first])
    # A row for all prompts of a batch has the position of the longest one.
    return evidence.token(evidence.longest_prompt(position) if prompt < 0 else prompt, position)
