"""The comparison of two dumps, from their files to the verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from assay.comparing.dump_wording import note_on_metric_limits
from assay.comparing.wording import format_count
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.files import write_whole
from assay.launch import on_first_rank
from assay.offline.contents import describe_reused
from assay.offline.judging.locating import DumpEvidence
from assay.offline.judging.model_folders import compare_quantized, judge_configs, open_quantized
from assay.offline.judging.rows import COLUMNS, list_tokens, make_table
from assay.offline.judging.verdict import judge_dumps, list_measurements
from assay.offline.measured_dumps import MeasuredDumps, Pairing, activation_dtype, measure_dumps
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.measuring.metrics import CustomMetric, load_metrics
from assay.offline.measuring.pair_values import QuantizedLayer, find_quantized_layers
from assay.offline.options import CompareOptions, refuse_dump_as_model, refuse_options_of_tensors
from assay.offline.pairing.alignment import find_passes
from assay.offline.pairing.matching import is_allowed
from assay.offline.pairing.port_series import Lane, Port
from assay.offline.replaying import Replayed, TrustedModel, replay_dump
from assay.output.tables import Table, format_table
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Measurement, Verdict

__all__ = ["CompareOptions", "Compared", "compare", "compare_dumps"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison."""

    verdict: Verdict
    measurements: Iterable[Measurement]
    table: Table | None = None
    """One row for each pair of tensors, if the user requested a table."""


def compare(comparison: CompareOptions, folder: Path, progress: Progress) -> Verdict:
    """Compare two dumps, and write verdict.json, measurements.jsonl and the requested table.

    Under torchrun every rank calls this function. All ranks measure; the first one judges and writes.
    """
    refuse_dump_as_model(comparison.model)
    custom = load_metrics(comparison.metrics, COLUMNS)
    with progress.step("reads the indexes"):
        expected, actual = (
            open_dump(path, comparison.format, comparison.model_name)
            for path in (comparison.expected, comparison.actual)
        )
        noise = open_dump(comparison.noise) if comparison.noise else None
    judge = _measure(comparison, expected, actual, progress, noise, custom)

    def write() -> Verdict:
        compared = judge()
        verdict = write_results(compared.verdict, compared.measurements, folder, comparison.command)
        if compared.table is not None and comparison.table is not None:
            with progress.step(f"writes {comparison.table}"):
                write_whole(comparison.table, format_table(compared.table, comparison.table.suffix))
        return verdict

    return on_first_rank(write)


def compare_dumps(
    comparison: CompareOptions, expected: Dump, actual: Dump, progress: Progress, noise: Dump | None = None
) -> Compared:  # fmt: skip
    """Compare opened dumps. noise: the noise dump."""
    return _measure(comparison, expected, actual, progress, noise, ())()


def _measure(
    comparison: CompareOptions, expected: Dump, actual: Dump, progress: Progress,
    noise: Dump | None, custom: Sequence[CustomMetric],
) -> Callable[[], Compared]:  # fmt: skip
    """Measure two dumps. Returns: a function that judges them, which only the first rank calls."""
    weights = open_quantized(expected, actual)
    if weights is not None:
        refuse_options_of_tensors(comparison)
    else:
        dumps = measure_dumps(comparison, expected, actual, progress, noise, custom)
    sides = {
        side: {"run": dump.name, "format": dump.format, **dump.provenance}
        for side, dump in (("reference", expected), ("candidate", actual))
    }

    def judge() -> Compared:
        if weights is not None:
            problems = [
                f"{one.name}: {text}" for one in (expected, actual) for text in one.problems
            ]
            compared = Compared(*compare_quantized(weights, comparison.allow_unmatched, problems))
        else:
            compared = _judge(dumps, progress, custom)
        verdict = judge_configs(compared.verdict, expected, actual)
        return replace(compared, verdict=verdict.model_copy(update=sides))

    return judge


def _judge(dumps: MeasuredDumps, progress: Progress, custom: Sequence[CustomMetric]) -> Compared:
    replayed = _replay(dumps, progress)
    evidence = _collect_evidence(dumps, replayed)
    verdict, judged = judge_dumps(evidence, dumps.limits)
    table = None
    if dumps.comparison.table is not None:
        names = [one.name for one in custom]
        table = make_table(dumps.measured.pairs, *dumps.pairing.lanes, judged, names)
    tokens, notes = list_tokens(evidence, judged)
    verdict = verdict.model_copy(update={"notes": [*verdict.notes, *notes]})
    return Compared(verdict, chain(list_measurements(judged), tokens), table)


def _replay(dumps: MeasuredDumps, progress: Progress) -> Replayed | None:
    """Replay the inputs of ACTUAL with --model, if the user named one."""
    comparison, actual = dumps.comparison, dumps.actual
    if comparison.model is None:
        return None
    with progress.step(f"replays {actual.name} with {comparison.model}"):
        trusted = TrustedModel(comparison.model, comparison.remote_code)
        passes = find_passes(actual, comparison.rank)
        return replay_dump(trusted, actual, passes, dumps.dtype, dumps.limits)


def _collect_evidence(dumps: MeasuredDumps, replayed: Replayed | None) -> DumpEvidence:
    expected, actual = dumps.expected, dumps.actual
    pairing, measured, flips = dumps.pairing, dumps.measured, dumps.flips
    repeats = [
        f"{side} holds the same values twice in a pass: {name_some(places)}"
        for side, places in measured.repeated.items()
    ]
    # Training may recompute activations.
    excuses_repeats = expected.is_training or measured.repeated.get(
        "EXPECTED"
    ) == measured.repeated.get("ACTUAL")
    quantized = find_quantized_layers(*pairing.lanes, pairing.matching.pairs, measured.coarse)
    missing = _list_missing(pairing, measured)
    unmatched = [one for one in missing if not is_allowed(one, dumps.comparison.allow_unmatched)]
    return DumpEvidence(
        dumps,
        replayed,
        quantized,
        unmatched,
        problems=[
            *(f"{dump.name}: {text}" for dump in (expected, actual) for text in dump.problems),
            *(f"{actual.name}: {text}" for text in describe_reused(dumps.reused)),
            *(f"{actual.name} lacks rank {rank}" for rank in sorted(dumps.lost_ranks)),
            *([] if excuses_repeats else repeats),
        ],
        notes=[
            *note_on_metric_limits(dumps.limits, dumps.dtype),
            *dumps.notes,
            *pairing.notes,
            *(
                f"expert choices that differ at near ties: {len(flips):,}, first in {one.module} at prompt"
                f" {one.prompt}, position {one.position}; their tokens are left out from there on"
                for one in flips[:1]
            ),
            *_describe_extent(dumps, len(missing) - len(unmatched), replayed),
            *_describe_unjudged(quantized, measured.num_sign_flips),
            *(repeats if excuses_repeats else []),
        ],
    )


def _list_missing(pairing: Pairing, measured: MeasuredPorts) -> list[str]:
    """Return the names of expected tensors and tokens without a partner."""
    repeated = {str(one) for one in _find_repeated_logits(pairing)}
    unmatched = [one for one in pairing.matching.unmatched_expected if one not in repeated]
    missing = [f"tokens of {one}" for one in pairing.alignment.missing]
    if pairing.alignment.missing_tokens:
        missing.append(f"{pairing.alignment.missing_tokens:,} tokens of other passes")
    return [*unmatched, *measured.unpaired, *missing]


def _find_repeated_logits(pairing: Pairing) -> list[Port]:
    """Return ports of EXPECTED without a partner whose logits a compared port repeats, bit for bit.

    A model returns what its lm_head computes. A trace of --level logits holds one of the two.
    """
    dump, lanes = pairing.expected, pairing.lanes[0]
    compared = [pair.expected for pair in pairing.matching.pairs if pair.port.level == "logits"]

    def repeats(lane: Lane, other: Lane) -> bool:
        keys = lane.tensors.keys()
        return keys <= other.tensors.keys() and all(
            len(other.tensors[key]) == len(lane.tensors[key])
            and all(map(dump.holds_equal, lane.tensors[key], other.tensors[key]))
            for key in keys
        )

    missing = set(pairing.matching.unmatched_expected)
    return [
        port
        for port, lane in lanes.items()
        if port.level == "logits"
        and str(port) in missing
        and any(repeats(lane, one) for one in compared)
    ]


def _describe_extent(
    dumps: MeasuredDumps, num_allowed: int, replayed: Replayed | None
) -> list[str]:
    """Describe the dtypes, the items without a partner, and what was replayed."""
    notes = []
    expected, actual = map(activation_dtype, (dumps.pairing.expected, dumps.pairing.actual))
    if expected != actual:
        is_coarser = FORMATS[expected].unit_roundoff > FORMATS[actual].unit_roundoff
        question = "; EXPECTED is usually the finer one: are the two swapped?" if is_coarser else ""
        notes.append(f"EXPECTED holds {expected}, ACTUAL {actual}{question}")
    if extra := dumps.pairing.matching.unmatched_actual:
        notes.append(f"only in ACTUAL ({len(extra):,}): {name_some(extra)}")
    if num_allowed:
        notes.append(f"expected items that --allow-unmatched excuses: {num_allowed:,}")
    places = [one for found in dumps.measured.results.values() for one in found.ports.values()]
    if padded := [one.num_padding for one in places if one.num_padding]:
        rows, of = format_count(sum(padded), "row"), format_count(len(padded), "place")
        notes.append(f"padding is not compared: {rows} at {of}")
    if replayed is not None and (model := dumps.comparison.model) is not None:
        notes.append(
            f"module boundaries of ACTUAL that are replayed with {model}: {replayed.num_ports:,}"
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
