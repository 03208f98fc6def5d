"""The comparison of two model folders: quantized weights, and configurations, which equal weights do not imply."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from assay.comparison.pairing.matching import is_allowed
from assay.dumps.protocol import Dump, DumpedTensor
from assay.judge.dump_wording import headline_of_settings, headline_of_weights
from assay.judge.levels import conclude, list_unmatched, notes_of, outcome_of_levels, rows_of
from assay.judge.model_folders import find_other_settings, judge_settings, judge_weight_levels
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import has_known_format
from assay.verdicts import Measurement, Outcome, Verdict

_MODEL = "model"  # the reader of Hugging Face folders
_PARAMETER = "parameter."


def open_quantized(expected: Dump, actual: Dump) -> tuple[WeightStore, WeightStore] | None:
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


def compare_quantized(
    stored: tuple[WeightStore, WeightStore],
    allow_unmatched: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> tuple[Verdict, list[Measurement]]:
    """Compare expected and actual weights, at least one of them quantized.

    problems: defects of the folders, which forbid PASS.
    """
    found = compare_weights(*stored)
    missing = [one for one in found.unmatched_expected if not is_allowed(one, allow_unmatched)]
    return judge_weights(replace(found, unmatched_expected=tuple(missing)), problems)


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


def judge_configs(verdict: Verdict, expected: Dump, actual: Dump) -> Verdict:
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
