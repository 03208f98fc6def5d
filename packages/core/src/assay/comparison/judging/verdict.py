"""The verdict on two measured dumps."""

from collections.abc import Sequence
from typing import Any

from assay.comparison.importing import describe_reused
from assay.comparison.judging.changes import describe_change
from assay.comparison.judging.judged_ports import JudgedPort, find_wrong_replicas, judge_ports
from assay.comparison.judging.locating import (
    Doubt,
    Findings,
    Origin,
    describe_given,
    find_cause,
    find_doubts,
    find_first_bad_token,
    find_first_unordered,
    find_origins,
    locate,
)
from assay.comparison.judging.rows import list_measurements
from assay.comparison.measured_dumps import MeasuredDumps, Pairing, activation_dtype
from assay.comparison.measuring.pair_measurer import count_blocks
from assay.comparison.measuring.pair_values import (
    QuantizedLayer,
    find_quantized_layers,
    find_worst_values,
)
from assay.comparison.pairing.matching import is_allowed
from assay.comparison.pairing.passes import DifferentToken
from assay.comparison.pairing.port_series import Port, Series, SeriesByPort
from assay.dtypes import FORMATS, float_format
from assay.dumps.protocol import DumpedTensor
from assay.errors import name_some
from assay.judge import dump_wording as wording
from assay.judge.levels import (
    EXACT_NUMBERS,
    MOST_LISTED,
    DecidingNumbers,
    LevelResult,
    conclude,
    deciding_numbers,
    describe_judged_level,
    failed,
    find_worst,
    level_of,
    list_unmatched,
    not_compared,
    not_run,
    outcome_of_levels,
    passed,
    pool_resolutions,
)
from assay.judge.wording import describe_location, describe_port, describe_seen, format_count
from assay.verdicts import Location, Outcome, Suspect, Verdict

# Coarser dtypes than float32 need a noise dump to see errors near their rounding.
_FINE_UNIT = float_format("float32").unit_roundoff

_LEVELS = ("weights", "logits", "modules", "operations", "gradients", "updates")


def judge_dumps(dumps: MeasuredDumps) -> tuple[Verdict, list[JudgedPort]]:
    """Judge all levels, and locate the first difference.

    Returns: the verdict, and all judged ports.
    """
    pairing, measured = dumps.pairing, dumps.measured
    found, doubts = _find_differences(dumps)
    missing = _list_missing(dumps)
    unmatched = [one for one in missing if not is_allowed(one, dumps.comparison.allow_unmatched)]
    repeats, are_repeats_excused = _describe_repeats(dumps)
    problems = [*_list_problems(dumps), *([] if are_repeats_excused else repeats)]
    levels = {
        "completeness": _judge_completeness(found, doubts, unmatched, problems),
        **({} if _hold_weights_only(pairing) else {"inputs": _judge_inputs(found)}),
        **({"tokens": _judge_tokens(found)} if pairing.tokens.num_generated else {}),
        **{
            name: _judge_level(found, name, places)
            for name in _LEVELS
            if (places := [one for one in found.judged if one.port.level == name])
        },
    }
    is_failure = (
        outcome_of_levels({name: one.level for name, one in levels.items()}) is Outcome.FAIL
    )
    cause = find_cause(found)
    quantized = find_quantized_layers(*pairing.series_of, pairing.matching.pairs, measured.coarse)
    is_unordered = bool(found.failed) and not dumps.expected.is_ordered
    metric_limits = wording.note_on_metric_limits(dumps.limits, dumps.dtype)
    is_equal = all(one.is_equal for one in found.judged)
    verdict = conclude(
        levels,
        cause,
        notes=[
            *metric_limits,
            *dumps.expected.notes,
            *dumps.actual.notes,
            *pairing.notes,
            *_describe_extent(dumps, len(missing) - len(unmatched)),
            *_describe_unjudged(quantized, measured.num_sign_flips),
            *(repeats if are_repeats_excused else []),
            *([wording.UNORDERED] if is_unordered else []),
            *_notes_on_noise(found),
        ],
        first_bad_token=find_first_bad_token(found) if is_failure else None,
        suspects=_list_suspects(found, is_unordered=is_unordered) if is_failure else [],
        compared=measured.compared,
        unmatched=list_unmatched(unmatched, pairing.matching.unmatched_actual),
        headline=_headline(found, cause.location, quantized)
        if is_failure
        else wording.headline_of_agreement(
            measured.compared,
            unmatched,
            len(measured.norm_errors),
            describe_seen([*list_measurements(found.judged, "accumulated")]),
            dumps.limits.name if metric_limits and not is_equal else "",
        ),
        **_numbers(found),
    )
    return verdict, [*found.judged]


def _find_differences(dumps: MeasuredDumps) -> tuple[Findings, list[Doubt]]:
    """Judge all places, and find those that make an error.

    Returns: also the places whose pair is doubtful, which are not judged.
    """
    pairing, matching = dumps.pairing, dumps.pairing.matching
    absent_masks = {series.port for series in (*matching.absent_masks, *matching.extra_masks)}
    judged = judge_ports(
        [*dumps.ports, *absent_masks],
        dumps.measured,
        dumps.noise,
        dumps.limits,
        pairing.unit_roundoff,
        find_worst_values(dumps.measured.pairs),
        max((count_blocks(one.site.at.module) for one in dumps.expected.tensors), default=0),
        is_ordered=dumps.expected.is_ordered,
    )
    doubts = find_doubts(judged, matching.pairs)
    judged = [one for one in judged if all(one is not other for other, _ in doubts)]
    origins = find_origins(judged, absent_masks)
    different = [one for one in judged if not one.agrees and one.port.level != "weights"]
    if different and not dumps.expected.is_ordered:
        origins = find_first_unordered(origins, different, judged)
    if (replayed := _replayed_origin(dumps)) is not None:
        module = replayed.judged.port.module
        origins = [replayed, *(one for one in origins if one.judged.port.module != module)]
    judged = [one for one in judged if one.port not in absent_masks]
    weights = [one for one in judged if one.port.level == "weights" and not one.agrees]
    return Findings(dumps, judged, weights, different, origins), doubts


def _replayed_origin(dumps: MeasuredDumps) -> Origin | None:
    """Return the stage that the replay located, as a judged port."""
    if dumps.replayed is None or dumps.replayed.origin is None:
        return None
    stage, reported = dumps.replayed.origin.stage, dumps.replayed.origin.reported
    port = Port(stage.module, reported.port.port, stage.phase)
    return Origin(JudgedPort(port, reported.port.order, reported.port, (reported,)), "replayed")


def _list_missing(dumps: MeasuredDumps) -> list[str]:
    """Return the names of expected tensors and tokens without a partner."""
    matching, alignment = dumps.pairing.matching, dumps.pairing.alignment
    repeated = {str(one) for one in _find_repeated_logits(dumps.pairing)}
    unmatched = [one for one in matching.unmatched_expected if one not in repeated]
    missing = [f"tokens of {one}" for one in alignment.missing]
    if alignment.missing_tokens:
        missing.append(f"{alignment.missing_tokens:,} tokens of other passes")
    return [*unmatched, *dumps.measured.unpaired, *missing]


def _find_repeated_logits(pairing: Pairing) -> list[Port]:
    """Return ports of EXPECTED without a partner whose logits a compared port repeats, bit for bit.

    A model returns what its lm_head computes. A trace of --level logits holds one of the two.
    """
    compared = [pair.expected for pair in pairing.matching.pairs if pair.port.level == "logits"]

    def repeats(series: Series, other: Series) -> bool:
        keys = series.tensors.keys()
        return keys <= other.tensors.keys() and all(
            len(other.tensors[key]) == len(series.tensors[key])
            and all(map(DumpedTensor.holds_equal, series.tensors[key], other.tensors[key]))
            for key in keys
        )

    missing = set(pairing.matching.unmatched_expected)
    return [
        port
        for port, series in pairing.series_of[0].items()
        if port.level == "logits"
        and str(port) in missing
        and any(repeats(series, one) for one in compared)
    ]


def _describe_repeats(dumps: MeasuredDumps) -> tuple[list[str], bool]:
    """Describe values that a side holds twice in a pass.

    Returns: also True if such values are expected: in training, or on both sides alike.
    """
    repeated: dict[str, list[str]] = {}
    for side, place in dumps.measured.repeated:
        repeated.setdefault(side, []).append(place)
    repeats = [
        f"{side} holds the same values twice in a pass: {name_some(places)}"
        for side, places in repeated.items()
    ]
    # Training may recompute activations.
    is_alike = repeated.get("EXPECTED") == repeated.get("ACTUAL")
    return repeats, dumps.expected.is_training or is_alike


def _hold_weights_only(pairing: Pairing) -> bool:
    """Return True if the dumps hold weights, and no value that a run computes, as model folders do."""
    return {port.level for series in pairing.series_of for port in series} == {"weights"}


def _list_problems(dumps: MeasuredDumps) -> list[str]:
    """Return the defects of either dump, such as missing files."""
    return [
        *(f"{one.name}: {text}" for one in (dumps.expected, dumps.actual) for text in one.problems),
        *(f"{dumps.actual.name}: {text}" for text in describe_reused(dumps.reused)),
        *(f"{dumps.actual.name} lacks rank {rank}" for rank in sorted(dumps.lost_ranks)),
    ]


def _judge_completeness(
    found: Findings, doubts: Sequence[Doubt], unmatched: list[str], problems: Sequence[str]
) -> LevelResult:
    """Judge the level `completeness`.

    unmatched: expected items without a partner that --allow-unmatched does not excuse.
    problems: defects of either dump.
    """
    dumps, measured, matching = found.dumps, found.dumps.measured, found.dumps.pairing.matching
    reasons = []
    if not measured.compared:
        reasons.append("no tensor has a partner")
    if unmatched:
        reasons.append(wording.describe_missing(unmatched))
        reasons += _list_unrecorded(*dumps.pairing.series_of, unmatched)
    if doubts:
        names = name_some([f"{one.expected.port} with {one.actual.port}" for _, one in doubts])
        reasons.append(
            f"{format_count(len(doubts), 'guessed pair')} differ, though what depends on them agrees, so"
            f" these are different values: {names}; --map names the right modules"
        )
    if matching.rotated and not any(one.port.direction == "output" for one in matching.pairs):
        reasons.append(
            "weights alone do not show which order of channels the code that loads them rotates:"
            f" {name_some(matching.rotated)}"
        )
    if empty := _list_empty(dumps):
        reasons.append(
            f"no comparable token is left at {format_count(len(empty), 'place')}, without padding"
            f" and after different tokens or expert choices: {name_some(empty)}"
        )
    unknown = [
        str(port)
        for port in dumps.ports
        if any(one.sums.lacks_expected for one in measured.of(port))
    ]
    if unknown:
        reasons.append(
            f"EXPECTED holds NaN or infinity at {len(unknown):,} places: {name_some(unknown)}"
        )
    reasons += problems
    reasons += find_wrong_replicas(
        measured.replica_errors, dumps.limits, dumps.pairing.unit_roundoff
    )
    if measured.norm_errors and not dumps.comparison.stats:
        places = format_count(len(measured.norm_errors), "place")
        reasons.append(
            f"{places} compared by the norms of tensors only, which an error may keep;"
            " --stats accepts that"
        )
    if blind := [str(one.port) for one in found.judged if one.is_blind]:
        reasons.append(
            f"{format_count(len(blind), 'place')} with so much expected noise that zeros would agree,"
            f" such as {blind[0]}; --noise DUMP measures it"
        )
    return not_compared("; ".join(reasons)) if reasons else passed(measured.compared)


_KINDS = {
    "parameter": "parameters", "changed": "values that calls change in place", "op": "operations",
    "input": "arguments", "output": "results", "update": "parameter updates",
}  # fmt: skip


def _list_unrecorded(
    expected: SeriesByPort, actual: SeriesByPort, missing: Sequence[str]
) -> list[str]:
    """Describe kinds of tensors that ACTUAL never holds, with the option that excuses their absence.

    missing: names of expected tensors without a partner.
    """
    if missing and not any(port.module for port in actual if port.level != "logits"):
        return ["ACTUAL holds nothing of single modules: --level logits compares what both hold"]
    held = {port.direction for port in actual}
    lacking = dict.fromkeys(port.direction for port in expected if port.direction not in held)
    return [
        f"ACTUAL holds no {_KINDS.get(kind, kind)}: --allow-unmatched '*:{kind}*' excuses them"
        for kind in lacking
        if any(f":{kind}" in name for name in missing)
    ]


def _list_empty(dumps: MeasuredDumps) -> list[str]:
    """Return the ports that lost all tokens."""
    measured = dumps.measured
    return [
        str(port)
        for port in dumps.ports
        if (found := measured.of(port))
        and not any(one.sums.num_elements or one.exact.num_compared for one in found)
        and not any(known == port for known, _, _ in measured.norm_errors)
    ]


def _judge_inputs(found: Findings) -> LevelResult:
    """Judge the level `inputs`: arguments that one side lacks, labels, then token ids."""
    tokens = found.dumps.pairing.tokens
    if given := describe_given(found):
        return failed(0, given)
    labels = [one for one in found.judged if one.port.phase == "inputs"]
    if different := [one for one in labels if not one.agrees]:
        reason = f"the labels differ, first in step {different[0].result.step}"
        return failed(len(labels), reason)
    if found.dumps.pairing.alignment.is_unrelated:
        return failed(0, wording.UNRELATED)
    if tokens.different_prompts:
        return _fail_ids(tokens.num_prompt_tokens, tokens.different_prompts, "prompts differ")
    if not tokens.num_prompt_tokens:
        return not_run("not both dumps have a tensor input_ids, so prompts were not compared")
    return passed(tokens.num_prompt_tokens)


def _fail_ids(compared: int, different: list[DifferentToken], what: str) -> LevelResult:
    return failed(compared, f"{what}: {len(different)}, first {different[0]}")


def _judge_tokens(found: Findings) -> LevelResult:
    """Judge the level `tokens`. A different token is not a fault if it is a near-tie of equal logits."""
    tokens = found.dumps.pairing.tokens
    compared, different = tokens.num_generated, tokens.different_generated
    logits_agree = all(one.agrees for one in found.judged if one.port.level == "logits")
    if any(one.is_near_tie is False or (one.is_near_tie and not logits_agree) for one in different):
        return _fail_ids(compared, different, "generated texts differ")
    if any(one.is_near_tie is None for one in different):
        reason = f"{different[0]}; without logits, it may be a near-tie or a fault"
        return not_compared(reason, compared)
    if not different:
        return passed(compared)
    reason = f"near-tie at {different[0]}; later tokens of that prompt are not compared"
    return passed(compared, reason=reason)


def _judge_level(found: Findings, name: str, places: Sequence[JudgedPort]) -> LevelResult:
    """Judge a level by its places. The level of the first origin reports that place."""
    origin, replayed = found.origin, found.dumps.replayed
    different = [one for one in places if not one.agrees]
    is_replayed = origin is not None and origin.evidence == "replayed"
    is_deciding = origin is not None and (
        any(one.result is origin.judged.result for one in places)
        or (is_replayed and name == "modules")
    )
    facts: dict[str, Any]
    if origin is not None and is_deciding:
        noise = wording.REPLAY_NOISE if is_replayed else found.dumps.noise_origin
        facts = describe_judged_level(origin.judged.ratios)
        facts["reason"] = wording.describe_origin(
            origin.judged.worst, noise, origin.evidence, origin.judged.port.name
        )
    else:
        facts = describe_judged_level([ratio for one in places for ratio in one.ratios])
        if different:
            facts["reason"] = f"{len(different):,} of {len(places):,} places differ"
            if name == "modules" and replayed is not None:
                facts["reason"] += f"; {wording.REPLAY_AGREES}"
    if name == "modules" and replayed is not None:
        facts["replayed"] = replayed.num_ports
    return LevelResult(level_of(len(places), len(different) + is_deciding, facts))


def _list_suspects(found: Findings, *, is_unordered: bool) -> list[Suspect]:
    made = [one.judged for one in found.origins if one.evidence != "given"]
    failed = found.failed if is_unordered else made
    ranked = sorted(failed, key=lambda one: (-one.worst.severity, one.order))
    suspects: list[Suspect] = []
    for one in ranked:
        location = locate(found.dumps, one)  # several ports of a module have one location
        if len(suspects) < MOST_LISTED and location not in [known.location for known in suspects]:
            suspects.append(one.worst.suspect(location))
    return suspects


def _headline(
    found: Findings, location: Location | None, quantized: Sequence[QuantizedLayer]
) -> str:
    """State the first difference, and a simple change that explains it."""
    text = _name_difference(found, location, quantized)
    origin = found.origin.judged if found.origin is not None else None
    deciding = found.weights[0] if found.weights else origin
    if location is None or deciding is None:
        return text
    change = describe_change(found.dumps, location, deciding, found.failed)
    return f"{text} {change}" if change else text


def _name_difference(
    found: Findings, location: Location | None, quantized: Sequence[QuantizedLayer]
) -> str:
    different = found.dumps.pairing.tokens.different_prompts
    if found.dumps.pairing.alignment.is_unrelated:
        return f"The prompts differ: {wording.UNRELATED}."
    if different:
        return f"The prompts differ: {different[0]}."
    if location is None:
        worst = sorted(found.failed, key=lambda one: -one.worst.severity)
        return wording.headline_without_place([str(one.port) for one in worst])
    for one in quantized:
        if one.module == location.module:
            return f"{one.module} is quantized in {one.side} only: {one.sign}."
    if found.weights:
        first = found.weights[0]
        return wording.headline_of_weight(
            location.parameter or "", first.result, first.worst, len(found.weights) - 1
        )
    place = describe_location(location)
    if found.origin is not None and location.module and not (location.op or location.parameter):
        place += describe_port(found.origin.judged.port.name)
    text = f"{place} is the first that differs."
    if given := describe_given(found):
        text = f"The inputs differ: {given}."
    reused = {one.site.at.module for one in found.dumps.reused}
    return f"{text} {wording.REUSED}" if location.module in reused else text


def _numbers(found: Findings) -> DecidingNumbers:
    """Return the numbers of the place that decides: a weight, the first origin, or the worst one."""
    ratios = [ratio for one in found.judged for ratio in one.ratios]
    pooled = pool_resolutions(ratios).get("accumulated")
    if found.weights:
        return EXACT_NUMBERS | {"resolution": pooled}
    if not ratios:
        return {}
    if found.origin is None:
        return deciding_numbers(find_worst(ratios), pooled)
    decided = found.origin.judged.worst
    is_accumulated = decided.statistic == "accumulated"
    return deciding_numbers(decided, decided.resolution if is_accumulated else pooled)


def _describe_extent(dumps: MeasuredDumps, num_allowed: int) -> list[str]:
    """Describe expert choices, dtypes, items without a partner, padding, and what was replayed."""
    flips, notes = dumps.flips, []
    if flips:
        notes.append(
            f"expert choices that differ at near ties: {len(flips):,}, first in {flips[0].module} at"
            f" prompt {flips[0].prompt}, position {flips[0].position}; their tokens are left out from"
            " there on"
        )
    expected, actual = map(activation_dtype, (dumps.pairing.expected, dumps.pairing.actual))
    if expected != actual:
        is_coarser = FORMATS[expected].unit_roundoff > FORMATS[actual].unit_roundoff
        question = "; EXPECTED is usually the finer one: are the two swapped?" if is_coarser else ""
        notes.append(f"EXPECTED holds {expected}, ACTUAL {actual}{question}")
    if extra := dumps.pairing.matching.unmatched_actual:
        notes.append(f"only in ACTUAL ({len(extra):,}): {name_some(extra)}")
    if num_allowed:
        notes.append(f"expected items that --allow-unmatched excuses: {num_allowed:,}")
    places = [one for found in dumps.measured.results.values() for one in found.values()]
    if padded := [one.num_padding for one in places if one.num_padding]:
        rows, of = format_count(sum(padded), "row"), format_count(len(padded), "place")
        notes.append(f"padding is not compared: {rows} at {of}")
    if dumps.replayed is not None and (model := dumps.comparison.model) is not None:
        notes.append(
            f"module boundaries of ACTUAL that are replayed with {model}: {dumps.replayed.num_ports:,}"
        )
    return notes


def _describe_unjudged(quantized: Sequence[QuantizedLayer], num_sign_flips: int) -> list[str]:
    """List the layers that only one side quantizes, and count updates that were not judged."""
    notes = []
    if quantized:
        modules = name_some([one.module for one in quantized])
        notes.append(f"quantized on one side only ({len(quantized):,}): {modules}")
    if num_sign_flips:
        notes.append(
            f"{format_count(num_sign_flips, 'element')} of updates not judged: a gradient near zero"
            " moves a weight by the learning rate in either direction"
        )
    return notes


def _notes_on_noise(found: Findings) -> list[str]:
    """State the origin of the noise; the headline of a PASS or the resolution of a FAIL says what it hides."""
    rows = [*list_measurements(found.judged, "accumulated")]
    if not rows:
        return []
    dumps = found.dumps
    is_coarse = dumps.noise is None and dumps.pairing.unit_roundoff > _FINE_UNIT
    advice = "; with --noise DUMP, smaller errors are seen" if is_coarse else ""
    notes, noise = [f"judged by {dumps.noise_origin}{advice}"], dumps.noise
    lacking = [str(port) for port in dumps.ports if noise is not None and not noise.of(port)]
    if lacking:
        notes.append(
            f"the noise dump lacks {format_count(len(lacking), 'place')}, judged by"
            f" {wording.EXPECTED_NOISE}: {name_some(lacking)}"
        )
    return notes
