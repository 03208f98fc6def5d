"""The comparison of two model folders: quantized weights, and configurations, which equal weights do not imply."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from assay.comparison.pairing.matching import is_allowed
from assay.dumps.protocol import Dump, DumpedTensor
from assay.dumps.readers.model_folder import TIED, flatten_settings, load_settings
from assay.files import read_json_object
from assay.judge.dump_wording import (
    describe_finding,
    describe_missing,
    describe_resolution,
    describe_setting,
    headline_of_settings,
    headline_of_weights,
)
from assay.judge.levels import (
    MOST_LISTED,
    Cause,
    LevelResult,
    conclude,
    list_unmatched,
    outcome_of_levels,
)
from assay.models.inspect.config_keys import inert_keys
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison, WeightResult
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import has_known_format
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
    return WeightStore(dump.path, shapes, lambda name: tensors[name].read())


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


_ABSENT = "absent"

# Keys that only training reads.
_OF_TRAINING = re.compile(r"dropout|_pdrop|layerdrop")
# Another class may compute the same, and a longest sequence limits callers.
_DOUBTFUL = frozenset({"model_type", "architectures"})
_LENGTHS = frozenset({"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"})
# Rotary frequencies that depend on the longest sequence (transformers 5.23, `modeling_rope_utils.py`).
_OF_LENGTH = frozenset({"dynamic", "yarn", "longrope"})


def judge_configs(verdict: Verdict, expected: Dump, actual: Dump) -> Verdict:
    """Add the level `config` to the verdict on two model folders whose configurations differ."""
    if {expected.format, actual.format} != {_MODEL}:
        return verdict
    found = _find_different(expected, actual)
    certain, doubtful, others = ([text for text, kind in found if kind == one] for one in (
        Outcome.FAIL, Outcome.NOT_COMPARED, Outcome.PASS,
    ))  # fmt: skip
    notes = [*verdict.notes, *others]
    if not certain and not doubtful:
        return verdict.model_copy(update={"notes": notes})
    outcome = Outcome.FAIL if certain else Outcome.NOT_COMPARED
    level = Level(verdict=outcome, reason="; ".join([*certain, *doubtful]))
    levels = {**verdict.levels, "config": level}
    update: dict[str, Any] = {
        "levels": levels,
        "verdict": outcome_of_levels(levels),
        "notes": notes,
    }
    if certain and verdict.verdict is not Outcome.FAIL:
        update |= {"diagnosis": "checkpoint-mismatch", "headline": headline_of_settings(certain)}
    return verdict.model_copy(update=update)


def _find_different(expected: Dump, actual: Dump) -> list[tuple[str, Outcome]]:
    """Describe each key that differs; FAIL changes a result, NOT_COMPARED may, PASS does not."""
    raw = [
        flatten_settings(read_json_object(one.path / "config.json")) for one in (expected, actual)
    ]
    if raw[0] == raw[1]:
        return []
    known = [one for one in (load_settings(expected), load_settings(actual)) if one is not None]
    is_known = len(known) == len(raw)
    sides = known if is_known else raw
    is_other_class = sides[0].get("model_type") != sides[1].get("model_type")
    types = {str(value) for one in sides for key, value in one.items() if key.endswith("rope_type")}
    found = []
    for key in sorted(sides[0].keys() | sides[1].keys()):
        values = [one.get(key, _ABSENT) for one in sides]
        name = key.rpartition(".")[2]
        if values[0] == values[1] or "._" in f".{key}":
            continue
        outcome = Outcome.FAIL
        is_form = key == TIED and (
            (values[0] is True and _lacks_weight(expected, actual))
            or (values[1] is True and _lacks_weight(actual, expected))
        )
        is_inert = name in inert_keys() and name not in _DOUBTFUL
        if is_form or is_inert or _OF_TRAINING.search(name):
            outcome = Outcome.PASS
        elif (
            name in _DOUBTFUL
            or is_other_class
            or (_ABSENT in values and not is_known)
            or (name in _LENGTHS and not types & _OF_LENGTH)
        ):
            outcome = Outcome.NOT_COMPARED
        found.append((describe_setting(key, *values), outcome))
    return found


def _lacks_weight(tied: Dump, other: Dump) -> bool:
    """Return True if `tied` stores no head: its embedding is compared with the head of `other`."""
    return not {one.site for one in other.tensors} <= {one.site for one in tied.tensors}
