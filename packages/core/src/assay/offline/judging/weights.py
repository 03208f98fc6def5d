"""The comparison of quantized weights with other weights, and its verdict."""

from collections.abc import Sequence
from dataclasses import replace

from assay.comparing.dump_wording import (
    describe_finding,
    describe_missing,
    describe_resolution,
    headline_of_weights,
)
from assay.comparing.levels import MOST_LISTED, Cause, LevelResult, conclude, list_unmatched
from assay.dumps.protocol import Dump, DumpedTensor
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison, WeightResult
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import has_known_format
from assay.offline.ports.matching import is_allowed
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict

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
    return WeightStore(dump.path, shapes, lambda name: dump.read(tensors[name]))


def judge_weights(
    comparison: WeightComparison, problems: Sequence[str] = ()
) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict, and one measurement for each weight."""
    levels = {
        "completeness": LevelResult(_judge_completeness(comparison, problems)),
        "weights": LevelResult(_judge_weights(comparison)),
    }
    worst = comparison.findings[0] if comparison.findings else None
    location = None
    if worst and worst.cause != "shard":
        module = worst.weight.rpartition(".")[0]
        location = Location(phase="forward", module=module, parameter=worst.weight)
    return conclude(
        levels,
        Cause("weight-mismatch", location),
        notes=_list_notes(comparison),
        noise_ratio=worst.ratio if worst else None,
        statistic="weight-error" if worst else None,
        resolution=max((one.resolution for one in comparison.results), default=None),
        compared=len(comparison.results),
        unmatched=list_unmatched(comparison.unmatched_expected, comparison.unmatched_actual),
        headline=headline_of_weights(comparison),
    ), [_row(one, order) for order, one in enumerate(comparison.results)]


def _judge_weights(comparison: WeightComparison) -> Level:
    """Judge the level `weights`. The reason lists the findings, worst first."""
    count = len(comparison.results)
    if not count:
        return Level(verdict=Outcome.NOT_COMPARED, reason="no weight has a partner")
    if comparison.findings:
        reasons = [describe_finding(one) for one in comparison.findings[:MOST_LISTED]]
        return Level(verdict=Outcome.FAIL, reason="; ".join(reasons), compared=count)
    return Level(verdict=Outcome.PASS, reason=describe_resolution(comparison), compared=count)


def _judge_completeness(comparison: WeightComparison, problems: Sequence[str]) -> Level:
    missing = [*comparison.unmatched_expected, *comparison.not_compared]
    reasons = [*([describe_missing(missing)] if missing else []), *problems]
    if reasons:
        return Level(verdict=Outcome.NOT_COMPARED, reason="; ".join(reasons))
    return Level(verdict=Outcome.PASS, compared=len(comparison.results))


def _list_notes(comparison: WeightComparison) -> list[str]:
    names = [one.name for one in comparison.results if one.is_rescaled]
    notes = [
        f"{len(names):,} weights have scales that other weights cancel, as in AWQ: {name}, ..."
        for name in names[:1]
    ]
    if comparison.results and not comparison.findings:
        notes.append(describe_resolution(comparison))
    return notes


def _row(result: WeightResult, order: int) -> Measurement:
    module, _, name = result.name.rpartition(".")
    return Measurement(
        level="weights", module=module, port=f"parameter.{name}", order=order,
        statistic="weight-error", actual=result.error, expected=result.best,
        ratio=result.worst_ratio,
    )  # fmt: skip
