"""From the measurements of two dumps to one verdict."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.comparing.levels import (
    EXACT_NUMBERS,
    MOST_LISTED,
    DecidingNumbers,
    deciding_numbers,
    describe_judged_level,
    find_worst,
    list_unmatched,
    outcome_of_levels,
    pool_resolutions,
)
from assay.comparing.limits import Limits
from assay.comparing.wording import dumps as wording
from assay.metrics import RowErrors
from assay.offline.judging.locating import (
    JudgedPort,
    MetricValues,
    Origin,
    find_origins,
    judge_ports,
    level_of,
)
from assay.offline.measuring.pair_measurer import Measured
from assay.offline.ports.lanes import Port
from assay.offline.replaying import Replayed
from assay.offline.tokens.alignment import TokenAlignment
from assay.offline.tokens.ids import DifferentToken, TokenComparison
from assay.stages import SYSTEMATIC
from assay.verdicts import (
    Diagnosis,
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Verdict,
)

# That of float32. Coarser dtypes need a noise dump to see errors near their own rounding.
_FINE_UNIT = 2.0**-24

_LEVELS = ("weights", "logits", "modules", "operations", "gradients")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a comparison of two dumps found."""

    ports: Sequence[Port]
    """Ports with a partner, in the expected order."""
    absent_masks: set[Port]
    """Attention masks that only the expected dump has. A difference there decides nothing by itself."""
    measured: Measured
    noise: Measured | None
    noise_origin: str
    replayed: Replayed | None
    """The replay of the actual dump, if a model is given."""
    tokens: TokenComparison
    alignment: TokenAlignment
    unit_roundoff: float
    metrics: MetricValues = field(default_factory=dict)
    unmatched_expected: list[str] = field(default_factory=list)
    unmatched_actual: list[str] = field(default_factory=list)
    reused_modules: Collection[str] = ()
    """Modules of which ACTUAL holds the values of one decode step in others."""
    accepts_statistics: bool = False
    """Whether a comparison of norms alone may pass."""
    problems: list[str] = field(default_factory=list)
    """Defects of either dump, such as missing files."""
    notes: list[str] = field(default_factory=list)


def judge_dumps(evidence: Evidence, limits: Limits) -> tuple[Verdict, list[JudgedPort]]:
    """Judge all levels, and locate the first place that differs.

    Returns: the verdict, and all judged ports.
    """
    ports = [*evidence.ports, *evidence.absent_masks]
    noise = None
    if evidence.noise is not None:
        of_noise = evidence.noise
        noise = {port: found[0] for port in ports if (found := of_noise.of(port))}
    judged = judge_ports(
        [(port, result) for port in ports for result in evidence.measured.of(port)],
        noise,
        limits,
        evidence.unit_roundoff,
        evidence.measured.norm_errors,
        evidence.metrics,
    )
    origins = find_origins(judged, evidence.absent_masks)
    judged = [one for one in judged if one.port not in evidence.absent_masks]
    by_level = {name: [one for one in judged if level_of(one.port) == name] for name in _LEVELS}
    replayed = _replayed_origin(evidence)
    if replayed is not None:
        others = [o for o in origins if o.judged.port.module != replayed.judged.port.module]
        origins = [replayed, *others]
    origin = origins[0] if origins else None
    weights = [one for one in by_level["weights"] if not one.agrees]
    levels = _levels(evidence, by_level, origin)
    outcome = outcome_of_levels(levels)
    location, diagnosis = _find_cause(evidence, weights, origin)
    is_failure = outcome is Outcome.FAIL
    verdict = Verdict(
        verdict=outcome,
        levels=levels,
        first_bad_token=_first_bad_token(evidence, judged, origin) if is_failure else None,
        location=location if is_failure else None,
        suspects=_suspects(origins, evidence) if is_failure else [],
        diagnosis=diagnosis if is_failure else None,
        notes=[*evidence.notes, *_notes_on_noise(evidence, judged)],
        compared=evidence.measured.compared,
        unmatched=list_unmatched(evidence.unmatched_expected, evidence.unmatched_actual),
        headline=_headline(evidence, location, weights) if is_failure
        else wording.headline_of_agreement(
            evidence.measured.compared,
            evidence.unmatched_expected,
            norms=len(evidence.measured.norm_errors),
        ),
        **_numbers(judged, origin, weights if is_failure else []),
    )  # fmt: skip
    return verdict, judged


def list_measurements(judged: Iterable[JudgedPort]) -> list[Measurement]:
    """Return the rows of measurements.jsonl."""
    return [row for one in judged for row in _rows(one)]


def _notes_on_noise(evidence: Evidence, judged: Sequence[JudgedPort]) -> list[str]:
    """State what noise was, and the smallest error that could have been seen."""
    ratios = [ratio for one in judged for ratio in one.ratios]
    resolution = pool_resolutions(ratios).get("accumulated")
    if resolution is None:
        return []
    advice = evidence.noise is None and evidence.unit_roundoff > _FINE_UNIT
    notes = [wording.describe_noise(evidence.noise_origin, resolution, coarse=advice)]
    if evidence.noise is not None:
        lacking = [str(port) for port in evidence.ports if not evidence.noise.of(port)]
        notes += [wording.describe_lacking_noise(lacking)] if lacking else []
    return notes


def _replayed_origin(evidence: Evidence) -> Origin | None:
    """Return the stage that the replay names, as a judged port."""
    if evidence.replayed is None or evidence.replayed.origin is None:
        return None
    stage, reported = evidence.replayed.origin.stage, evidence.replayed.origin.reported
    port = Port(stage.module, reported.port.port, stage.phase)
    return Origin(JudgedPort(port, reported.port.order, reported.port, (reported,)), "replayed")


def _levels(
    evidence: Evidence, by_level: dict[str, list[JudgedPort]], origin: Origin | None
) -> dict[str, Level]:
    tokens = evidence.tokens
    levels = {
        "completeness": _completeness(evidence),
        "inputs": _inputs_level(evidence),
    }
    if tokens.num_generated:
        levels["tokens"] = _tokens_level(tokens)
    for name, items in by_level.items():
        if not items:
            continue
        failed = [one for one in items if not one.agrees]
        is_deciding = origin is not None and (
            origin.judged in items or (origin.evidence == "replayed" and name == "modules")
        )
        shown = origin.judged.ratios if origin is not None and is_deciding else [
            ratio for one in items for ratio in one.ratios
        ]  # fmt: skip
        facts: dict[str, Any] = describe_judged_level(shown)
        if origin is not None and is_deciding:
            is_replayed = origin.evidence == "replayed"
            noise = wording.REPLAY_NOISE if is_replayed else evidence.noise_origin
            facts["reason"] = (
                f"{wording.describe_difference(origin.judged.worst, noise)};"
                f" {wording.describe_evidence(origin.evidence)}"
            )
        elif failed:
            facts["reason"] = f"{len(failed):,} of {len(items):,} places differ"
            if name == "modules" and evidence.replayed is not None:
                facts["reason"] += f"; {wording.REPLAY_AGREES}"
        if name == "modules" and evidence.replayed is not None:
            facts["replayed"] = evidence.replayed.num_ports
        outcome = Outcome.FAIL if failed or is_deciding else Outcome.PASS
        levels[name] = Level(verdict=outcome, compared=len(items), **facts)
    return levels


def _completeness(evidence: Evidence) -> Level:
    reasons = []
    if evidence.unmatched_expected:
        reasons.append(wording.describe_missing(evidence.unmatched_expected))
    empty = _list_empty(evidence)
    if empty:
        reasons.append(wording.describe_left_out(empty))
    reasons += evidence.problems
    if evidence.measured.norm_errors and not evidence.accepts_statistics:
        reasons.append(wording.describe_norms_only(len(evidence.measured.norm_errors)))
    if not evidence.measured.compared:
        reasons.insert(0, "no tensor has a partner")
    if reasons:
        return Level(verdict=Outcome.NOT_COMPARED, reason="; ".join(reasons))
    return Level(verdict=Outcome.PASS, compared=evidence.measured.compared)


def _list_empty(evidence: Evidence) -> list[str]:
    """Return the places of which all tokens were left out."""
    measured = evidence.measured
    return [
        str(port)
        for port in evidence.ports
        if (found := measured.of(port))
        and not any(one.sums.num_elements or one.exact.num_compared for one in found)
        and not any(known == port for known, _ in measured.norm_errors)
    ]


def _inputs_level(evidence: Evidence) -> Level:
    tokens = evidence.tokens
    if evidence.alignment.is_unrelated:
        return Level(verdict=Outcome.FAIL, reason=wording.UNRELATED)
    return _ids_level(tokens.num_prompt_tokens, tokens.different_prompts, "prompts differ")


def _ids_level(compared: int, different: list[DifferentToken], what: str) -> Level:
    if different:
        reason = f"{what}: {len(different)}, first {different[0]}"
        return Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    if not compared:
        return Level(verdict=None, reason="the dumps do not both hold token ids")
    return Level(verdict=Outcome.PASS, compared=compared)


def _tokens_level(tokens: TokenComparison) -> Level:
    different = tokens.different_generated
    if any(one.is_near_tie is False for one in different):
        return _ids_level(tokens.num_generated, different, "generated texts differ")
    if any(one.is_near_tie is None for one in different):
        reason = f"{different[0]}; without logits, a near-tie cannot be told from a fault"
        return Level(verdict=Outcome.NOT_COMPARED, reason=reason, compared=tokens.num_generated)
    if not different:
        return Level(verdict=Outcome.PASS, compared=tokens.num_generated)
    reason = f"near-tie at {different[0]}; later tokens of that prompt are not compared"
    return Level(verdict=Outcome.PASS, reason=reason, compared=tokens.num_generated)


def _find_cause(
    evidence: Evidence, weights: list[JudgedPort], origin: Origin | None
) -> tuple[Location | None, Diagnosis | None]:
    """Return the first cause, in the order in which one can explain the other."""
    if evidence.tokens.different_prompts or evidence.alignment.is_unrelated:
        return Location(phase="inputs"), "inputs-differ"
    if weights:
        port = weights[0].port
        name = port.name.removeprefix("parameter.")
        parameter = f"{port.module}.{name}" if port.module else name
        return Location(phase="forward", module=port.module, parameter=parameter), "weight-mismatch"
    if origin is not None:
        worst = origin.judged.worst
        diagnosis: Diagnosis = (
            "non-finite" if worst.ratio.statistic == "non-finite" else "module-error"
        )
        return _location(evidence, origin.judged), diagnosis
    if any(one.is_near_tie is False for one in evidence.tokens.different_generated):
        return Location(phase="sampler"), "sampler"
    return None, None


def _location(evidence: Evidence, judged: JudgedPort) -> Location:
    port = judged.port
    op = port.name.split(".")[2] if port.direction == "op" else None
    step = _step_of(evidence, *_first_row(evidence, judged))
    rank = judged.result.rank
    return Location(phase=port.phase, step=step, rank=rank, module=port.module, op=op)


def _first_row(evidence: Evidence, judged: JudgedPort) -> tuple[int, int]:
    """Return prompt and position of the first row over the limit; of the worst one if none is."""
    if judged.result.exact.num_different:
        return judged.result.exact.first
    rows = RowErrors.concatenate(judged.result.sums.rows)
    bad = ~(rows.relative() <= judged.worst.limit * judged.worst.ratio.expected)
    if judged.worst.ratio.statistic in SYSTEMATIC or not bool(bad.any()):
        _, prompt, position = judged.result.sums.worst_row()
        return prompt, position
    places = zip(rows.prompt[bad].tolist(), rows.position[bad].tolist(), strict=True)
    return min(places, key=lambda place: (_step_of(evidence, *place), place))


def _step_of(evidence: Evidence, prompt: int, position: int) -> int:
    for pair in evidence.alignment.pairs:
        rows = pair.expected.rows
        held = rows.positions[rows.prompts.index(prompt)] if rows and prompt in rows.prompts else ()
        if position in held:
            return pair.expected.step
    return 0


def _first_bad_token(
    evidence: Evidence, judged: Sequence[JudgedPort], origin: Origin | None
) -> TokenPosition | None:
    """Return the first different token, or the first whose logits are over their limit."""
    for different in evidence.tokens.different:
        phase = "prefill" if different.is_prompt else "decode"
        return TokenPosition(prompt=different.prompt, position=different.position, phase=phase)
    logits = [one for one in judged if level_of(one.port) == "logits" and not one.agrees]
    source = logits[0] if logits else origin.judged if origin else None
    if source is None or source.port.direction == "parameter":
        return None
    prompt, position = _first_row(evidence, source)
    if prompt < 0 or position < 0:
        return None
    step = _step_of(evidence, prompt, position)
    return TokenPosition(prompt=prompt, position=position, phase="decode" if step else "prefill")


def _suspects(origins: Sequence[Origin], evidence: Evidence) -> list[Suspect]:
    ranked = sorted((one.judged for one in origins), key=lambda one: -one.worst.severity)
    return [
        Suspect(
            location=_location(evidence, one),
            statistic=one.worst.ratio.statistic,
            error=one.worst.ratio.actual,
            noise_ratio=one.worst.ratio.value,
            limit=one.worst.limit,
        )
        for one in ranked[:MOST_LISTED]
    ]


def _headline(evidence: Evidence, location: Location | None, weights: list[JudgedPort]) -> str:
    different = evidence.tokens.different_prompts
    if evidence.alignment.is_unrelated:
        return f"The prompts differ: {wording.UNRELATED}."
    if different:
        return f"The prompts differ: {different[0]}."
    if weights and location is not None:
        return wording.headline_of_weight(
            location.parameter or "", weights[0].result, len(weights) - 1
        )
    if location is None:
        return "The dumps differ."
    text = wording.headline_of_place(location)
    return f"{text} {wording.REUSED}" if location.module in evidence.reused_modules else text


def _numbers(
    judged: Sequence[JudgedPort], origin: Origin | None, weights: list[JudgedPort]
) -> DecidingNumbers:
    ratios = [ratio for one in judged for ratio in one.ratios]
    if weights:
        return EXACT_NUMBERS | {"resolution": pool_resolutions(ratios).get("accumulated")}
    if not ratios:
        return {}
    decided = origin.judged.worst if origin is not None else find_worst(ratios)
    resolutions = pool_resolutions(ratios)
    return deciding_numbers(decided, resolutions.get("accumulated"))


def _rows(judged: JudgedPort) -> Iterable[Measurement]:
    port = judged.port
    for item in judged.ratios:
        yield Measurement(
            level=level_of(port), module=port.module, port=port.name, phase=port.phase,
            order=judged.order, rank=judged.result.rank, statistic=item.ratio.statistic, actual=item.ratio.actual,
            expected=item.ratio.expected, ratio=item.ratio.value, limit=item.limit,
        )  # fmt: skip
