"""The verdict on two measured dumps."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from assay.comparing import dump_wording as wording
from assay.comparing.levels import (
    EXACT_NUMBERS,
    MOST_LISTED,
    Cause,
    DecidingNumbers,
    LevelResult,
    conclude,
    deciding_numbers,
    describe_judged_level,
    find_worst,
    list_unmatched,
    outcome_of_levels,
    pool_resolutions,
)
from assay.comparing.limits import Limits
from assay.comparing.wording import describe_location, describe_port, describe_unseen, format_count
from assay.dtypes import float_format
from assay.errors import name_some
from assay.offline.contents import list_unrecorded
from assay.offline.expected_noise import count_blocks
from assay.offline.judging.changes import describe_change
from assay.offline.judging.judged_ports import JudgedPort
from assay.offline.judging.locating import (
    Doubt,
    DumpEvidence,
    Origin,
    describe_given,
    find_cause,
    find_doubts,
    find_first_bad_token,
    find_origins,
    find_wrong_replicas,
    is_inside,
    judge_ports,
    locate,
)
from assay.offline.measuring.metrics import find_worst_values
from assay.offline.pairing.alignment import DifferentToken, TokenComparison
from assay.offline.pairing.port_series import Port
from assay.verdicts import (
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    Verdict,
)

# Coarser dtypes than float32 need a noise dump to see errors near their rounding.
_FINE_UNIT = float_format("float32").unit_roundoff

# The container of repeated blocks, and the number of one.
_BLOCK = re.compile(r"(?:(.*?)\.)?(\d{1,9})(?:\.|$)")

_LEVELS = ("weights", "logits", "modules", "operations", "gradients", "updates")


def judge_dumps(evidence: DumpEvidence, limits: Limits) -> tuple[Verdict, list[JudgedPort]]:
    """Judge all levels, and locate the first difference.

    Returns: the verdict, and all judged ports.
    """
    dumps, pairing = evidence.dumps, evidence.dumps.pairing
    matching = pairing.matching
    absent_masks = {lane.port for lane in (*matching.absent_masks, *matching.extra_masks)}
    judged = judge_ports(
        [*dumps.ports, *absent_masks],
        dumps.measured,
        dumps.noise,
        limits,
        pairing.unit_roundoff,
        find_worst_values(dumps.measured.pairs),
        max((count_blocks(one.site.at.module) for one in dumps.expected.tensors), default=0),
        is_ordered=dumps.expected.is_ordered,
    )
    doubts = find_doubts(judged, pairing.matching.pairs)
    judged = [one for one in judged if all(one is not other for other, _ in doubts)]
    origins = find_origins(judged, absent_masks)
    failed = [one for one in judged if not one.agrees and one.port.level != "weights"]
    unordered = [wording.UNORDERED] if failed and not dumps.expected.is_ordered else []
    if unordered:
        origins = _find_unordered(origins, failed, judged)
    judged = [one for one in judged if one.port not in absent_masks]
    by_level = {name: [one for one in judged if one.port.level == name] for name in _LEVELS}
    replayed = _replayed_origin(evidence)
    if replayed is not None:
        others = [o for o in origins if o.judged.port.module != replayed.judged.port.module]
        origins = [replayed, *others]
    origin = origins[0] if origins else None
    weights = [one for one in by_level["weights"] if not one.agrees]
    labels = [one for one in judged if one.port.phase == "inputs"]
    completeness = _completeness(evidence, limits, judged, doubts)
    levels = _levels(evidence, completeness, by_level, origin) | _labels_level(labels)
    given = describe_given(evidence, origin)
    if given:
        levels["inputs"] = Level(verdict=Outcome.FAIL, reason=given)
    is_failure = outcome_of_levels(levels) is Outcome.FAIL
    location, diagnosis = find_cause(evidence, judged, weights, origin)
    made = [one.judged for one in origins if one.evidence != "given"]
    suspected = failed if unordered else made
    headline = _headline(evidence, location, weights, failed, origin)
    deciding = weights[0] if weights else origin.judged if origin is not None else None
    if is_failure and location is not None and deciding is not None:
        change = describe_change(evidence, location, deciding, failed)
        headline = f"{headline} {change}" if change else headline
    verdict = conclude(
        {name: LevelResult(level) for name, level in levels.items()},
        Cause(diagnosis, location),
        notes=[*evidence.notes, *unordered, *_notes_on_noise(evidence, judged)],
        first_bad_token=find_first_bad_token(evidence, judged, origin) if is_failure else None,
        suspects=_suspects(suspected, evidence) if is_failure else [],
        compared=evidence.dumps.measured.compared,
        unmatched=list_unmatched(evidence.unmatched_expected, pairing.matching.unmatched_actual),
        headline=headline if is_failure else wording.headline_of_agreement(
            evidence.dumps.measured.compared,
            evidence.unmatched_expected,
            norms=len(evidence.dumps.measured.norm_errors),
        ),
        **_numbers(judged, origin, weights if is_failure else []),
    )  # fmt: skip
    return verdict, judged


def _find_unordered(
    origins: list[Origin], failed: list[JudgedPort], judged: Sequence[JudgedPort]
) -> list[Origin]:
    """Return the only place that can be the first of several, if tensors are ordered by name; or [].

    It makes its error from equal inputs, or it is the only one in the first block that differs. If an earlier
    block agrees, places outside of the blocks differ because of it.
    """
    made_here = [one for one in origins if one.evidence != "growth"]
    if len(made_here) == 1 or len(failed) == 1:
        return made_here or origins
    inner = [
        one
        for one in failed
        if not any(is_inside(other.port.module, one.port.module) for other in failed)
    ]
    blocks = [(one, found) for one in inner if (found := _BLOCK.match(one.port.module))]
    first = min((int(found[2]) for _, found in blocks), default=0)
    in_first = [one for one, found in blocks if int(found[2]) == first]
    if len(in_first) != 1 or len({found[1] for _, found in blocks}) != 1:
        return []
    has_earlier = any(
        found[1] == blocks[0][1][1] and int(found[2]) < first
        for one in judged
        if (found := _BLOCK.match(one.port.module))
    )
    is_outside = any(
        not _BLOCK.match(one.port.module) for one in inner if one.port.level != "logits"
    )
    return [Origin(in_first[0], "growth")] if has_earlier or not is_outside else []


def list_measurements(judged: Iterable[JudgedPort], only: str = "") -> Iterator[Measurement]:
    """Yield the rows of measurements.jsonl. only: the one statistic that is wanted, if any."""
    for one in judged:
        place = {"phase": one.port.phase, "order": one.order, "rank": one.result.rank}
        for item in one.ratios:
            if only in ("", item.statistic):
                yield item.measurement(one.port.level, one.port.name, one.port.module, **place)


def _notes_on_noise(evidence: DumpEvidence, judged: Sequence[JudgedPort]) -> list[str]:
    """State the origin of the noise, and the smallest visible error."""
    rows = [*list_measurements(judged, "accumulated")]
    if not rows:
        return []
    dumps = evidence.dumps
    is_coarse = dumps.noise is None and dumps.pairing.unit_roundoff > _FINE_UNIT
    advice = "; --noise DUMP shows smaller ones" if is_coarse else ""
    text = f"judged by {dumps.noise_origin}: {describe_unseen(rows)}{advice}"
    notes, noise = [text], dumps.noise
    lacking = [str(port) for port in dumps.ports if noise is not None and not noise.of(port)]
    if lacking:
        notes.append(
            f"the noise dump lacks {format_count(len(lacking), 'place')}, judged by"
            f" {wording.EXPECTED_NOISE}: {name_some(lacking)}"
        )
    return notes


def _replayed_origin(evidence: DumpEvidence) -> Origin | None:
    """Return the stage that the replay located, as a judged port."""
    if evidence.replayed is None or evidence.replayed.origin is None:
        return None
    stage, reported = evidence.replayed.origin.stage, evidence.replayed.origin.reported
    port = Port(stage.module, reported.port.port, stage.phase)
    return Origin(JudgedPort(port, reported.port.order, reported.port, (reported,)), "replayed")


def _levels(
    evidence: DumpEvidence, completeness: Level, by_level: dict[str, list[JudgedPort]],
    origin: Origin | None,
) -> dict[str, Level]:  # fmt: skip
    tokens = evidence.dumps.pairing.tokens
    levels = {
        "completeness": completeness,
        "inputs": _inputs_level(evidence),
    }
    if tokens.num_generated:
        agrees = all(one.agrees for one in by_level["logits"])
        levels["tokens"] = _tokens_level(tokens, logits_agree=agrees)
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
            noise = wording.REPLAY_NOISE if is_replayed else evidence.dumps.noise_origin
            facts["reason"] = wording.describe_origin(
                origin.judged.worst, noise, origin.evidence, origin.judged.port.name
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


def _completeness(
    evidence: DumpEvidence, limits: Limits, judged: Sequence[JudgedPort], doubts: Sequence[Doubt]
) -> Level:
    reasons = []
    if evidence.unmatched_expected:
        reasons.append(wording.describe_missing(evidence.unmatched_expected))
        lanes = evidence.dumps.pairing.lanes
        reasons += list_unrecorded(*lanes, evidence.unmatched_expected)
    if doubts:
        names = name_some([f"{one.expected.port} with {one.actual.port}" for _, one in doubts])
        reasons.append(
            f"{format_count(len(doubts), 'guessed pair')} differ, though what depends on them agrees, so"
            f" these are different values: {names}; --map names the right modules"
        )
    matching = evidence.dumps.pairing.matching
    if matching.rotated and not any(one.port.direction == "output" for one in matching.pairs):
        reasons.append(
            "weights alone do not show which order of channels the code that loads them rotates:"
            f" {name_some(matching.rotated)}"
        )
    if empty := _list_empty(evidence):
        reasons.append(
            f"no comparable token is left at {format_count(len(empty), 'place')}, without padding"
            f" and after different tokens or expert choices: {name_some(empty)}"
        )
    unknown = [
        str(port)
        for port in evidence.dumps.ports
        if any(one.sums.lacks_expected for one in evidence.dumps.measured.of(port))
    ]
    if unknown:
        reasons.append(
            f"EXPECTED holds NaN or infinity at {len(unknown):,} places: {name_some(unknown)}"
        )
    reasons += evidence.problems
    reasons += find_wrong_replicas(
        evidence.dumps.measured.replica_errors, limits, evidence.dumps.pairing.unit_roundoff
    )
    if evidence.dumps.measured.norm_errors and not evidence.dumps.comparison.stats:
        places = format_count(len(evidence.dumps.measured.norm_errors), "place")
        reasons.append(
            f"{places} compared by the norms of tensors only, which an error may keep;"
            " --stats accepts that"
        )
    if blind := [str(one.port) for one in judged if one.is_blind]:
        reasons.append(
            f"{format_count(len(blind), 'place')} with so much expected noise that zeros would agree,"
            f" such as {blind[0]}; --noise DUMP measures it"
        )
    if not evidence.dumps.measured.compared:
        reasons.insert(0, "no tensor has a partner")
    if reasons:
        return Level(verdict=Outcome.NOT_COMPARED, reason="; ".join(reasons))
    return Level(verdict=Outcome.PASS, compared=evidence.dumps.measured.compared)


def _list_empty(evidence: DumpEvidence) -> list[str]:
    """Return the ports that lost all tokens."""
    measured = evidence.dumps.measured
    return [
        str(port)
        for port in evidence.dumps.ports
        if (found := measured.of(port))
        and not any(one.sums.num_elements or one.exact.num_compared for one in found)
        and not any(known == port for known, _, _ in measured.norm_errors)
    ]


def _inputs_level(evidence: DumpEvidence) -> Level:
    tokens = evidence.dumps.pairing.tokens
    if evidence.dumps.pairing.alignment.is_unrelated:
        return Level(verdict=Outcome.FAIL, reason=wording.UNRELATED)
    return _ids_level(tokens.num_prompt_tokens, tokens.different_prompts, "prompts differ")


def _labels_level(labels: Sequence[JudgedPort]) -> dict[str, Level]:
    """Return the level `inputs` if labels of a training step differ, else an empty dict."""
    different = [one for one in labels if not one.agrees]
    if not different:
        return {}
    reason = f"the labels differ, first in step {different[0].result.step}"
    return {"inputs": Level(verdict=Outcome.FAIL, reason=reason, compared=len(labels))}


def _ids_level(compared: int, different: list[DifferentToken], what: str) -> Level:
    if different:
        reason = f"{what}: {len(different)}, first {different[0]}"
        return Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    if not compared:
        return Level(verdict=None, reason="the dumps do not both hold token ids")
    return Level(verdict=Outcome.PASS, compared=compared)


def _tokens_level(tokens: TokenComparison, *, logits_agree: bool) -> Level:
    different = tokens.different_generated
    if any(one.is_near_tie is False or (one.is_near_tie and not logits_agree) for one in different):
        return _ids_level(tokens.num_generated, different, "generated texts differ")
    if any(one.is_near_tie is None for one in different):
        reason = f"{different[0]}; without logits, it may be a near-tie or a fault"
        return Level(verdict=Outcome.NOT_COMPARED, reason=reason, compared=tokens.num_generated)
    if not different:
        return Level(verdict=Outcome.PASS, compared=tokens.num_generated)
    reason = f"near-tie at {different[0]}; later tokens of that prompt are not compared"
    return Level(verdict=Outcome.PASS, reason=reason, compared=tokens.num_generated)


def _suspects(suspected: Sequence[JudgedPort], evidence: DumpEvidence) -> list[Suspect]:
    ranked = sorted(suspected, key=lambda one: -one.worst.severity)
    found: list[Suspect] = []
    for one in ranked:
        location = locate(evidence, one)  # several ports of a module have one location
        if len(found) < MOST_LISTED and location not in [known.location for known in found]:
            found.append(one.worst.suspect(location))
    return found


def _headline(
    evidence: DumpEvidence, location: Location | None, weights: list[JudgedPort],
    failed: list[JudgedPort], origin: Origin | None,
) -> str:  # fmt: skip
    different = evidence.dumps.pairing.tokens.different_prompts
    if evidence.dumps.pairing.alignment.is_unrelated:
        return f"The prompts differ: {wording.UNRELATED}."
    if different:
        return f"The prompts differ: {different[0]}."
    for one in evidence.quantized:
        if location is not None and one.module == location.module:
            return f"{one.module} is quantized in {one.side} only: {one.sign}."
    if weights and location is not None:
        return wording.headline_of_weight(
            location.parameter or "", weights[0].result, weights[0].worst, len(weights) - 1
        )
    if location is None:
        return wording.headline_without_place([str(one.port) for one in failed])
    place = describe_location(location)
    if origin is not None and location.module and not location.op and not location.parameter:
        place += describe_port(origin.judged.port.name)
    text = f"{place} is the first that differs."
    if given := describe_given(evidence, origin):
        text = f"The inputs differ: {given}."
    reused = {one.site.at.module for one in evidence.dumps.reused}
    return f"{text} {wording.REUSED}" if location.module in reused else text


def _numbers(
    judged: Sequence[JudgedPort], origin: Origin | None, weights: list[JudgedPort]
) -> DecidingNumbers:
    ratios = [ratio for one in judged for ratio in one.ratios]
    if weights:
        return EXACT_NUMBERS | {"resolution": pool_resolutions(ratios).get("accumulated")}
    if not ratios:
        return {}
    decided = origin.judged.worst if origin is not None else find_worst(ratios)
    is_at_origin = origin is not None and decided.statistic == "accumulated"
    pooled = pool_resolutions(ratios).get("accumulated")
    return deciding_numbers(decided, decided.resolution if is_at_origin else pooled)
