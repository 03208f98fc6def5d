"""The levels inputs and modules: what every stage made of the reference's inputs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from assay.comparing.judge import (
    DeviceBias,
    FailedStage,
    Judged,
    find_origin,
    judge_replay,
    rank_stages,
)
from assay.comparing.results import PortResult, ReplayResults
from assay.generate.evidence import Evidence, LevelResult, outcome_of
from assay.metrics import RowErrors
from assay.verdicts import Level, Location, Measurement, Outcome, TokenPosition, Unmatched

if TYPE_CHECKING:
    from assay.stages import Stage

_LISTED = 50
_NAMED = 5
_SYSTEMATIC = ("replay-slope", "replay-bins", "replay-channel", "replay-share")


@dataclass(slots=True)
class ReplayJudgement:
    """What the replay showed.

    ranked: failed stages, worst first; origin: where the error is made.
    """

    inputs: LevelResult
    modules: LevelResult
    ranked: list[FailedStage] = field(default_factory=list)
    origin: FailedStage | None = None
    unmatched: Unmatched = field(default_factory=Unmatched)


def judge_module_levels(evidence: Evidence) -> ReplayJudgement:
    """Judge every stage; where several fail, find the one that makes the error."""
    if evidence.golden.level != "modules":
        reason = f"the golden was captured at level {evidence.golden.level}"
        return ReplayJudgement(LevelResult.not_run(reason), LevelResult.not_run(reason))
    replay = ReplayResults.from_parts(
        evidence.candidate.attachment_json("replay"),  # type: ignore[arg-type]
        evidence.candidate.attachment("replay-sums"),
    )
    noise = evidence.section.noise()
    judged, bias = judge_replay(replay, noise, evidence.limits)
    unmatched = Unmatched(
        expected=replay.unmatched_expected[:_LISTED], actual=replay.unmatched_actual[:_LISTED]
    )
    inputs = [item for item in judged if item.port.stage.phase == "inputs"]
    modules = [item for item in judged if item.port.stage.phase != "inputs"]
    judgement = ReplayJudgement(
        LevelResult(_level(inputs, Unmatched())),
        LevelResult(
            _level(modules, unmatched),
            _rows(judged, noise, evidence) + _drift_rows(judged, evidence),
        ),
        rank_stages(judged),
        unmatched=unmatched,
    )
    judgement.modules.notes = _notes(replay, bias)
    judgement.origin = find_origin(judgement.ranked)
    for level in (judgement.inputs.level, judgement.modules.level):
        _describe_decision(level, judgement.origin, evidence)
    if judgement.origin is not None:
        judgement.modules.first_bad = _first_bad_token(judgement.origin.told, noise, evidence)
    return judgement


def location_of(failed: FailedStage) -> Location:
    """Phase and module of a stage."""
    return Location(phase=failed.stage.phase, module=failed.stage.module)


def _level(judged: list[Judged], unmatched: Unmatched) -> Level:
    compared = len({(item.port.module, item.port.port) for item in judged})
    outcome = outcome_of(compared, [item for item in judged if item.failed])
    if outcome is Outcome.PASS and unmatched.expected:
        outcome = Outcome.NOT_COMPARED
    if not judged:
        return Level(verdict=outcome, compared=compared)
    worst = max(judged, key=lambda item: item.severity)
    resolution: dict[str, float] = {}
    for item in judged:
        if item.limit:
            known = resolution.get(item.ratio.statistic, 0.0)
            resolution[item.ratio.statistic] = max(known, item.resolution)
    facts: dict[str, Any] = {
        "statistic": worst.ratio.statistic,
        "noise_ratio": worst.ratio.value,
        "limit": worst.limit,
        "module": worst.port.stage.module,
        "resolution": resolution,
    }
    return Level(verdict=outcome, compared=compared, **facts)


def _describe_decision(level: Level, origin: FailedStage | None, evidence: Evidence) -> None:
    facts: dict[str, Any] = {"limits_origin": evidence.limits.origin}
    if origin is not None:
        worst = origin.told.port.sums.worst
        if worst.index:
            facts["worst_element"] = {
                "index": list(worst.index),
                "actual": worst.actual,
                "expected": worst.expected,
            }
    for name, value in facts.items():
        setattr(level, name, value)


def _notes(replay: ReplayResults, bias: DeviceBias | None) -> list[str]:
    notes = []
    if bias is not None:
        notes.append(
            f"all {bias.num_modules} matrix products shrink their results by about"
            f" {-bias.slope:.1e}: the device truncates sums. This is not counted as an error;"
            " an equal error in all of them would not be seen"
        )
    if replay.covered:
        notes.append(
            f"{len(replay.covered)} modules of the reference are not called here; they are covered"
            f" by the modules that contain them: {', '.join(replay.covered[:_NAMED])}"
        )
    ties = sum(port.exact.num_near_ties for port in replay.ports.values())
    if ties:
        notes.append(
            f"{ties} routing choices differ where the scores are nearly equal; their rows are left"
            " out"
        )
    return notes


def _first_bad_token(
    told: Judged, noise: ReplayResults, evidence: Evidence
) -> TokenPosition | None:
    rows = RowErrors.concatenate(told.port.sums.rows)
    if rows.error.numel() == 0 or told.ratio.statistic == "exact":
        prompt, position = told.port.exact.first
        return evidence.token(prompt, position) if prompt >= 0 else None
    # A systematic error is in every row, and in none over a limit of its own.
    threshold = 0.0
    if told.ratio.statistic not in _SYSTEMATIC:
        reference = noise.ports.get((told.port.module, told.port.port))
        worst = reference.sums.worst_row()[0] if reference is not None else 0.0
        floor = evidence.unit_roundoff / 2
        threshold = evidence.limits.of("replay-row") * max(worst, floor)
        if not bool((~(rows.relative() <= threshold)).any()):
            threshold = told.ratio.expected
    bad = ~(rows.relative() <= threshold) & (rows.prompt >= 0) & (rows.position >= 0)
    numbers = bad.nonzero()[:, 0].tolist()
    if not numbers:
        return None
    first = min(numbers, key=lambda i: (int(rows.position[i]), int(rows.prompt[i])))
    return evidence.token(int(rows.prompt[first]), int(rows.position[first]))


def _rows(judged: list[Judged], noise: ReplayResults, evidence: Evidence) -> list[Measurement]:
    rows = []
    ports: dict[tuple[str, str], PortResult] = {}
    for item in judged:
        ports[item.port.module, item.port.port] = item.port
        rows.append(
            Measurement(
                **_place(item.port), statistic=item.ratio.statistic, actual=item.ratio.actual,
                expected=item.ratio.expected, ratio=item.ratio.value, limit=item.limit,
            )
        )  # fmt: skip
    return rows + _token_rows(ports, noise, evidence)


def _token_rows(
    ports: dict[tuple[str, str], PortResult], noise: ReplayResults, evidence: Evidence
) -> list[Measurement]:
    """For every stage and token the worst of its ports."""
    floor = evidence.unit_roundoff / 2
    worst: dict[tuple[Stage, int, int], tuple[float, float, float, PortResult]] = {}
    for key, port in ports.items():
        reference = noise.ports.get(key)
        expected = _by_token(reference.sums.rows if reference is not None else [])
        for (prompt, position), error in _by_token(port.sums.rows).items():
            noise_error = expected.get((prompt, position), 0.0)
            ratio = error / max(noise_error, floor)
            token = (port.stage, prompt, position)
            if token not in worst or not ratio <= worst[token][0]:
                worst[token] = (ratio, error, noise_error, port)
    steps = {
        (prompt, position): evidence.call_of(evidence.token(prompt, position))[1]
        for _, prompt, position in worst
    }
    return [
        Measurement(
            **_place(port), statistic="token", actual=error, expected=noise_error, ratio=ratio,
            prompt=prompt, position=position, step=steps[prompt, position],
        )
        for (_, prompt, position), (ratio, error, noise_error, port) in worst.items()
    ]  # fmt: skip


def _drift_rows(judged: list[Judged], evidence: Evidence) -> list[Measurement]:
    """The error that accumulates along the depth in an ordinary run, of candidate and noise run."""
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
            statistic="accumulated", actual=error, expected=noise.get(module, 0.0),
            ratio=error / max(noise.get(module, 0.0), floor),
        )
        for module, error in actual.items()
        if module in order
    ]  # fmt: skip


def _place(port: PortResult) -> dict[str, Any]:
    """Columns of a row that say where: the stage, and the port as seen from it."""
    own = port.module == port.stage.module
    return {
        "level": "inputs" if port.stage.phase == "inputs" else "modules",
        "module": port.stage.module,
        "port": port.port if own else f"{port.module}:{port.port}",
        "phase": port.stage.phase,
        "order": port.order,
    }


def _by_token(parts: list[RowErrors]) -> dict[tuple[int, int], float]:
    """The worst relative error of each token."""
    rows = RowErrors.concatenate(parts)
    worst: dict[tuple[int, int], float] = {}
    for prompt, position, error in zip(
        rows.prompt.tolist(), rows.position.tolist(), rows.relative().tolist(), strict=True
    ):
        known = worst.get((prompt, position))
        if prompt >= 0 and position >= 0 and (known is None or not error <= known):
            worst[prompt, position] = error
    return worst
