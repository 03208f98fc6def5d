"""`assay compare`: reads two dumps, compares them, and writes the verdict."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from assay.comparing.limits import Limits, load_limits
from assay.comparing.wording import dumps as wording
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.files import read_json_object, read_toml, write_whole
from assay.metrics import PairSums
from assay.models.remote_code import RemoteCode
from assay.offline.completeness.endings import find_cut_off
from assay.offline.completeness.lost_ranks import find_lost_ranks
from assay.offline.completeness.reused_buffers import describe_reused, find_reused_buffers
from assay.offline.judging.causes import Evidence
from assay.offline.judging.locating import (
    coarser_unit,
    count_blocks,
    expected_score_noise,
    measured_score_noise,
)
from assay.offline.judging.quantized_layers import find_quantized_layers
from assay.offline.judging.token_rows import list_tokens
from assay.offline.judging.verdict import judge_dumps, list_measurements
from assay.offline.judging.weights import compare_quantized, open_quantized
from assay.offline.measuring.coarseness import CoarsenessObserver
from assay.offline.measuring.measured import Measured
from assay.offline.measuring.norm_sums import NormSums
from assay.offline.measuring.routing import Flip, ScoreNoise
from assay.offline.metrics.custom import CustomMetric, load_metrics
from assay.offline.metrics.observer import MetricObserver
from assay.offline.metrics.published import measure_as_published, measure_metrics
from assay.offline.metrics.table import COLUMNS, make_table
from assay.offline.pairing import Pairing, PairingOptions, pair_dumps
from assay.offline.ports.matching import is_allowed
from assay.offline.replaying import Replayed, TrustedModel, replay_dump
from assay.offline.tokens.alignment import find_passes
from assay.offline.tokens.mixed_passes import split_mixed_passes
from assay.offline.tokens.ranks import number_ranks
from assay.output.tables import Table, format_table
from assay.runs import Progress
from assay.runs.results import write_results
from assay.sites import ComparedLevel
from assay.verdicts import Measurement, Verdict

# Relative error of a whole tensor that no rounding causes, in any dtype that models run in.
_LARGEST_NOISE = 0.5

# Options without a meaning for quantized weights, by field of `Comparison`. The table comes last: --metric
# and --compat ask for one, too.
_OPTIONS_OF_TENSORS = {
    "model": "--model", "noise": "--noise", "level": "--level", "name_map": "--map", "rank": "--rank",
    "token_shift": "--token-shift", "limits": "--limits", "stats": "--stats", "metrics": "--metric",
    "compat": "--compat", "table": "a table as --output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """The options of a comparison. command: what to type for the same comparison."""

    expected: str
    actual: str
    model: str | None = None
    remote_code: RemoteCode = "refuse"
    noise: str | None = None
    level: ComparedLevel | None = None
    name_map: str | None = None
    allow_unmatched: tuple[str, ...] = ()
    rank: int | None = None
    token_shift: int | None = None
    format: str | None = None
    limits: str = "noise"
    stats: bool = False
    metrics: tuple[str, ...] = ()
    """FILE.py:FUNC of each metric of the user."""
    compat: bool = False
    """Measure metrics by the formulas as published, not by the corrected ones."""
    table: Path | None = None
    """File for a table of all tensors."""
    command: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison. table: one row for each pair of tensors, if it was asked for."""

    verdict: Verdict
    measurements: list[Measurement]
    table: Table | None


def compare(comparison: Comparison, folder: Path, progress: Progress) -> Verdict:
    """Compare two dumps, and write verdict.json, measurements.jsonl and the table, if one is asked for."""
    custom = load_metrics(comparison.metrics, COLUMNS)
    with progress.step("reads the indexes"):
        expected = open_dump(comparison.expected, comparison.format)
        actual = open_dump(comparison.actual, comparison.format)
        noise = open_dump(comparison.noise) if comparison.noise else None
    compared = compare_dumps(comparison, expected, actual, progress, noise, custom)
    verdict = write_results(compared.verdict, compared.measurements, folder, comparison.command)
    if compared.table is not None and comparison.table is not None:
        with progress.step(f"writes {comparison.table}"):
            write_whole(comparison.table, format_table(compared.table, comparison.table.suffix))
    return verdict


def compare_dumps(
    comparison: Comparison, expected: Dump, actual: Dump, progress: Progress,
    noise: Dump | None = None, custom: Sequence[CustomMetric] = (),
) -> Compared:  # fmt: skip
    """Compare opened dumps. noise: the third dump, if there is one; custom: metrics of the user."""
    sides = {"reference": _describe(expected), "candidate": _describe(actual)}
    weights = open_quantized(expected, actual)
    if weights is not None:
        _refuse_options_of_tensors(comparison)
        verdict, rows = compare_quantized(weights, comparison.allow_unmatched)
        return Compared(verdict.model_copy(update=sides), rows, None)
    options = PairingOptions(
        comparison.level, comparison.rank, comparison.token_shift, _read_map(comparison.name_map)
    )
    expected, expected_notes = _normalize(expected)
    actual, actual_notes = _normalize(actual)
    lost = find_lost_ranks(expected, actual) if comparison.rank is None else set()
    expected = replace(
        expected, tensors=[one for one in expected.tensors if one.site.at.rank not in lost]
    )
    expected = _leave_out_reused(expected)
    reused = find_reused_buffers(actual)
    dtype = _activation_dtype(actual)
    limits = _load_limits(comparison, dtype)
    metrics = MetricObserver(measure_as_published if comparison.compat else measure_metrics, custom)
    unit = coarser_unit([_activation_dtype(expected), dtype, expected.rounded_to])
    measured_noise = None
    score_noise = expected_score_noise(unit)
    if noise is not None:
        with progress.step("measures the noise"):
            measured_noise = measure_noise(comparison, expected, noise, options, score_noise)
        score_noise = measured_score_noise(measured_noise, score_noise)
    with progress.step("compares the dumps"):
        pairing = pair_dumps(expected, actual, options)
        coarseness = CoarsenessObserver()
        needs_metrics = comparison.table is not None or limits.names_metrics
        flips = pairing.find_flips(score_noise)
        measured = pairing.measure(
            [coarseness, *([metrics] if needs_metrics else [])],
            flips=flips,
            flips_spread=noise is None,
            by_statistics=comparison.stats,
            sums=PairSums if noise is not None else NormSums,
        )
    replayed = None
    if comparison.model is not None:
        with progress.step(f"replays {actual.path} with {comparison.model}"):
            trusted = TrustedModel(comparison.model, comparison.remote_code)
            passes = find_passes(actual, comparison.rank)
            replayed = replay_dump(trusted, actual, passes, dtype, limits)
    repeats = [wording.describe_repeats(*one) for one in measured.repeated.items()]
    excuses_repeats = _have_same_repeats(measured) or _is_training(expected)
    quantized = find_quantized_layers(*pairing.lanes, pairing.matching.pairs, coarseness.coarse)
    evidence = Evidence(
        quantized=quantized,
        ports=[*(pair.port for pair in pairing.matching.pairs), *measured.updates],
        absent_masks={lane.port for lane in pairing.matching.absent_masks},
        measured=measured,
        noise=measured_noise,
        noise_origin=f"the noise of {noise.path}" if noise else wording.EXPECTED_NOISE,
        replayed=replayed,
        tokens=pairing.tokens,
        alignment=pairing.alignment,
        unit_roundoff=coarser_unit(pairing.dtypes),
        num_blocks=max((count_blocks(one.site.at.module) for one in expected.tensors), default=0),
        metrics=metrics.worst_values(),
        unmatched_expected=_list_unmatched(comparison, _list_missing(pairing, measured)),
        unmatched_actual=pairing.matching.unmatched_actual,
        notes=[
            *wording.note_on_metric_limits(limits, dtype),
            *expected_notes,
            *actual_notes,
            *pairing.notes,
            *_describe_flips(flips),
            *_describe_extent(comparison, pairing, measured, replayed),
            *wording.note_on_quantized([one.module for one in quantized]),
            *(repeats if excuses_repeats else []),
        ],
        accepts_statistics=comparison.stats,
        problems=[
            *(f"{dump.path}: {text}" for dump in (expected, actual) for text in dump.problems),
            *(f"{actual.path}: {text}" for text in describe_reused(reused)),
            *(f"{actual.path} lacks rank {rank}" for rank in sorted(lost)),
            *([] if excuses_repeats else repeats),
        ],
        reused_modules={one.site.at.module for one in reused},
    )
    verdict, judged = judge_dumps(evidence, limits)
    table = None
    if comparison.table is not None:
        names = [one.name for one in custom]
        table = make_table(metrics.pairs, *pairing.lanes, judged, names)
    tokens, notes = list_tokens(evidence, judged)
    verdict = verdict.model_copy(update={**sides, "notes": [*verdict.notes, *notes]})
    return Compared(verdict, list_measurements(judged) + tokens, table)


def _refuse_options_of_tensors(comparison: Comparison) -> None:
    """Raise UsageError for options that a comparison of quantized weights would ignore."""
    default = Comparison(comparison.expected, comparison.actual)
    given = [
        option
        for name, option in _OPTIONS_OF_TENSORS.items()
        if getattr(comparison, name) != getattr(default, name)
    ]
    if given:
        raise UsageError(
            "one of the two is a quantized model folder, whose weights are compared as they are:"
            f" leave out {', '.join(given)}"
        )


def measure_noise(
    comparison: Comparison, expected: Dump, noise: Dump, options: PairingOptions, scores: ScoreNoise
) -> Measured:
    """Measure the errors of the noise dump. scores: the noise that router scores let expect.

    Raises: DumpError if it is no healthy run of the same model on the same prompts.
    """
    pairing = pair_dumps(expected, _normalize(noise)[0], options)
    measured = pairing.measure(flips=pairing.find_flips(scores))
    _require_healthy(comparison, pairing, measured)
    return measured


def _load_limits(comparison: Comparison, dtype: str) -> Limits:
    limits = load_limits(comparison.limits, dtype)
    needs_noise = comparison.model or comparison.noise or comparison.stats
    if needs_noise and not limits.names_noise_ratios:
        raise UsageError(
            "--model, --noise and --stats judge by noise ratios,"
            f" and the limits {limits.name!r} name none"
        )
    return limits


def _require_healthy(comparison: Comparison, pairing: Pairing, noise: Measured) -> None:
    """Refuse a noise dump of another model or of other prompts.

    Its errors would excuse anything.
    """
    problem = ""
    worst = max(
        (
            error
            for port in (pair.port for pair in pairing.matching.pairs)
            for one in noise.of(port)
            if math.isfinite(error := one.sums.relative_error)
        ),
        default=math.inf,
    )
    reused = describe_reused(find_reused_buffers(pairing.actual))
    if reused:
        problem = reused[0]
    elif comparison.noise == comparison.actual:
        problem = "it is ACTUAL itself"
    elif comparison.noise == comparison.expected:
        problem = "it is EXPECTED itself, whose error is 0"
    elif pairing.alignment.is_unrelated or pairing.tokens.different_prompts:
        problem = "it holds other prompts than EXPECTED"
    elif worst > _LARGEST_NOISE:
        problem = (
            f"its values differ from EXPECTED's by {worst:.2g} of their size, far beyond rounding"
        )
    if problem:
        raise DumpError(f"--noise {comparison.noise}: {problem}")


def _normalize(dump: Dump) -> tuple[Dump, list[str]]:
    """Give passes, batches and layers one numbering, whatever folders and ranks hold them."""
    dump, mixed = split_mixed_passes(dump)
    dump, notes = number_ranks(dump)
    dump = replace(dump, problems=[*dump.problems, *find_cut_off(dump)])
    return dump, [mixed, *notes] if mixed else notes


def _leave_out_reused(dump: Dump) -> Dump:
    """Drop tensors with the values of another step, and make a problem of them."""
    reused = find_reused_buffers(dump)
    dropped = {one.site for one in reused}
    return replace(
        dump,
        tensors=[one for one in dump.tensors if one.site not in dropped],
        problems=[*dump.problems, *describe_reused(reused)],
    )


def _list_missing(pairing: Pairing, measured: Measured) -> list[str]:
    """Return the names of expected tensors and tokens without a partner."""
    missing = [f"tokens of {one}" for one in pairing.alignment.missing]
    if pairing.alignment.missing_tokens:
        missing.append(f"{pairing.alignment.missing_tokens:,} tokens of other passes")
    return [*pairing.matching.unmatched_expected, *measured.unpaired, *missing]


def _list_unmatched(comparison: Comparison, missing: Sequence[str]) -> list[str]:
    """Return those of `missing` that --allow-unmatched does not excuse."""
    return [name for name in missing if not is_allowed(name, comparison.allow_unmatched)]


def _describe_extent(
    comparison: Comparison, pairing: Pairing, measured: Measured, replayed: Replayed | None
) -> list[str]:
    """Note what the comparison does not cover, and what a reader may not expect."""
    notes = []
    dtypes = [_activation_dtype(dump) for dump in (pairing.expected, pairing.actual)]
    if dtypes[0] != dtypes[1]:
        notes.append(wording.describe_dtypes(*dtypes))
    if pairing.matching.unmatched_actual:
        notes.append(wording.describe_extra(pairing.matching.unmatched_actual))
    missing = _list_missing(pairing, measured)
    excused = len(missing) - len(_list_unmatched(comparison, missing))
    if excused:
        notes.append(wording.describe_allowed(excused))
    if replayed is not None and comparison.model is not None:
        notes.append(wording.describe_replay(replayed.num_ports, comparison.model))
    return notes


def _describe_flips(flips: Sequence[Flip]) -> list[str]:
    if not flips:
        return []
    first = flips[0]
    return [wording.describe_flips(len(flips), first.module, first.prompt, first.position)]


def _have_same_repeats(measured: Measured) -> bool:
    """Return True if both sides recorded the same calls twice."""
    return measured.repeated.get("EXPECTED") == measured.repeated.get("ACTUAL")


def _is_training(dump: Dump) -> bool:
    """Return True for a training step, whose activations may have been recomputed."""
    return any(one.site.at.phase == "backward" for one in dump.tensors)


def _describe(dump: Dump) -> dict[str, str]:
    return {"run": str(dump.path), "format": dump.format, **dump.provenance}


def _activation_dtype(dump: Dump) -> str:
    """Return the dtype of most floating-point activations."""
    counts = Counter(
        one.dtype
        for one in dump.tensors
        if one.dtype in FORMATS and not one.site.port.startswith("parameter.")
    )
    return counts.most_common(1)[0][0] if counts else "float32"


def _read_map(path: str | None) -> dict[str, str]:
    """Read --map: a TOML or JSON table of expected to actual module names."""
    if path is None:
        return {}
    file = Path(path).expanduser()
    table = read_json_object(file) if file.suffix == ".json" else read_toml(file)
    names = {str(key): value for key, value in table.items() if isinstance(value, str)}
    if len(names) != len(table):
        raise DumpError(f"{path} holds more than pairs of module names")
    return names
