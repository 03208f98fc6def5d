"""The comparison of two dumps, from their files to the verdict; of model folders also quantized weights and settings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from assay.comparison.judging.rows import COLUMNS, list_measurements, list_tokens, make_table
from assay.comparison.judging.verdict import judge_dumps
from assay.comparison.measured_dumps import CompareOptions, MeasuredDumps, measure_dumps
from assay.comparison.measuring.pair_values import CustomMetric, load_metrics
from assay.comparison.pairing.matching import is_allowed
from assay.comparison.pairing.passes import find_passes
from assay.comparison.replaying import Replayed, TrustedModel, replay_dump
from assay.dumps.protocol import Dump, DumpedTensor
from assay.dumps.recognizing import open_dump, readers
from assay.errors import UsageError
from assay.files import write_whole
from assay.judge.dump_wording import headline_of_settings, headline_of_weights
from assay.judge.levels import conclude, list_unmatched, notes_of, outcome_of_levels, rows_of
from assay.judge.model_folders import find_other_settings, judge_settings, judge_weight_levels
from assay.launch import on_first_rank
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import has_known_format
from assay.output.tables import Table, format_table
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Measurement, Outcome, Verdict

__all__ = ["CompareOptions", "Compared", "compare", "compare_dumps"]

_MODEL = "model"  # the reader of Hugging Face folders
_PARAMETER = "parameter."

# Options that do not apply to quantized weights, by field. The table is last: --metric and --compat imply it.
_OPTIONS_OF_TENSORS = {
    "model": "--model", "noise": "--noise", "level": "--level", "name_map": "--map",
    "order": "--order", "rank": "--rank",
    "token_shift": "--token-shift", "limits": "--limits", "stats": "--stats", "metrics": "--metric",
    "compat": "--compat", "table": "a table as --output",
}  # fmt: skip


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
    _refuse_dump_as_model(comparison.model)
    custom = load_metrics(comparison.metrics, COLUMNS)
    with progress.step("reading the indexes"):
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
            with progress.step(f"writing {comparison.table}"):
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
    weights = _open_quantized(expected, actual)
    if weights is None:
        dumps = measure_dumps(comparison, expected, actual, progress, noise, custom)
        judge = partial(_judge, dumps, progress, custom)
    else:
        _refuse_options_of_tensors(comparison)
        problems = [f"{one.name}: {text}" for one in (expected, actual) for text in one.problems]
        judge = partial(_judge_quantized, weights, comparison.allow_unmatched, problems)
    sides = {
        side: {"run": dump.name, "format": dump.format, **dump.provenance}
        for side, dump in (("reference", expected), ("candidate", actual))
    }

    def judge_all() -> Compared:
        compared = judge()
        verdict = _judge_configs(compared.verdict, expected, actual)
        return replace(compared, verdict=verdict.model_copy(update=sides))

    return judge_all


def _judge(dumps: MeasuredDumps, progress: Progress, custom: Sequence[CustomMetric]) -> Compared:
    dumps = replace(dumps, replayed=_replay(dumps, progress))
    verdict, judged = judge_dumps(dumps)
    table = None
    if dumps.comparison.table is not None:
        names = [one.name for one in custom]
        table = make_table(dumps.measured.pairs, *dumps.pairing.series_of, judged, names)
    tokens, notes = list_tokens(dumps, judged)
    verdict = verdict.model_copy(update={"notes": [*verdict.notes, *notes]})
    return Compared(verdict, chain(list_measurements(judged), tokens), table)


def _replay(dumps: MeasuredDumps, progress: Progress) -> Replayed | None:
    """Replay the inputs of ACTUAL with --model, if the user named one."""
    comparison, actual = dumps.comparison, dumps.actual
    if comparison.model is None:
        return None
    with progress.step(f"replaying {actual.name} with {comparison.model}"):
        trusted = TrustedModel(comparison.model, comparison.remote_code)
        passes = find_passes(actual, comparison.rank)
        return replay_dump(trusted, actual, passes, dumps.dtype, dumps.limits)


def _refuse_dump_as_model(model: str | None) -> None:
    """Raise UsageError if --model names a dump."""
    path = Path(model or "")
    if model is None or not path.exists() or (path / "config.json").exists():
        return
    for reader in readers():
        if reader.recognize(path):
            raise UsageError(
                f"--model {model} is a dump ({reader.name}): name the model that made it, a folder with"
                " config.json, a hub name or micro:RECIPE"
            )


def _refuse_options_of_tensors(comparison: CompareOptions) -> None:
    """Raise UsageError for options that do not apply to quantized weights."""
    default = CompareOptions(comparison.expected, comparison.actual)
    given = [
        option
        for name, option in _OPTIONS_OF_TENSORS.items()
        if getattr(comparison, name) != getattr(default, name)
    ]
    if given:
        raise UsageError(
            "one side is a quantized model folder, so only weights are compared:"
            f" leave out {', '.join(given)}"
        )


def _open_quantized(expected: Dump, actual: Dump) -> tuple[WeightStore, WeightStore] | None:
    """Open the weights of two dumps; None if neither is a model folder with quantized weights.

    Raises: UsageError, with file and key, for unreadable weights.
    """
    if _MODEL not in (expected.format, actual.format):
        return None
    stored = _open_weights(expected), _open_weights(actual)
    if not any(one.quantization for one in stored):
        return None
    if all(one.quantization and not has_known_format(one) for one in stored):
        return None  # the stored tensors can still be compared
    return stored


def _open_weights(dump: Dump) -> WeightStore:
    if dump.format == _MODEL:
        return open_folder(dump.path)
    tensors: dict[str, DumpedTensor] = {}
    for one in dump.tensors:
        at, port = one.site.at, one.site.port
        if at.phase == "forward" and port.startswith(_PARAMETER) and one.has_values:
            name = port.removeprefix(_PARAMETER)
            tensors.setdefault(f"{at.module}.{name}" if at.module else name, one)
    shapes = {name: one.shape or () for name, one in tensors.items()}
    return WeightStore(dump.path, shapes, lambda name: tensors[name].read())


def _judge_quantized(
    weights: tuple[WeightStore, WeightStore], allow_unmatched: Sequence[str], problems: Sequence[str]
) -> Compared:  # fmt: skip
    """Compare expected and actual weights, at least one of them quantized.

    problems: defects of the folders, which forbid PASS.
    """
    found = compare_weights(*weights)
    missing = [one for one in found.unmatched_expected if not is_allowed(one, allow_unmatched)]
    return Compared(*judge_weights(replace(found, unmatched_expected=tuple(missing)), problems))


def judge_weights(
    comparison: WeightComparison, problems: Sequence[str] = ()
) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict, and one measurement for each weight."""
    levels = judge_weight_levels(comparison, problems)
    worst = comparison.findings[0] if comparison.findings else None
    return conclude(
        levels,
        levels["weights"].cause,
        notes=notes_of(levels),
        noise_ratio=worst.ratio if worst else None,
        statistic="weight-error" if worst else None,
        resolution=max((one.resolution for one in comparison.results), default=None),
        compared=len(comparison.results),
        unmatched=list_unmatched(comparison.unmatched_expected, comparison.unmatched_actual),
        headline=headline_of_weights(comparison),
    ), rows_of(levels)


def _judge_configs(verdict: Verdict, expected: Dump, actual: Dump) -> Verdict:
    """Add the level `config` to the verdict on two model folders whose configurations differ."""
    if {expected.format, actual.format} != {_MODEL}:
        return verdict
    held = {one.site for one in expected.tensors}, {one.site for one in actual.tensors}
    found = find_other_settings(expected.path, actual.path, held)
    level = judge_settings(found)
    if level is None:
        return verdict
    notes = [*verdict.notes, *level.notes]
    if level.level.verdict is Outcome.PASS:
        return verdict.model_copy(update={"notes": notes})
    levels = {**verdict.levels, "config": level.level}
    update: dict[str, Any] = {
        "levels": levels,
        "verdict": outcome_of_levels(levels),
        "notes": notes,
    }
    if level.level.verdict is Outcome.FAIL and verdict.verdict is not Outcome.FAIL:
        certain = [text for text, kind in found if kind is Outcome.FAIL]
        update |= {"diagnosis": "checkpoint-mismatch", "headline": headline_of_settings(certain)}
    return verdict.model_copy(update=update)
