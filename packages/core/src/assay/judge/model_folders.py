"""The judgment of two model folders: their weights, at least one side quantized, and their configurations."""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from assay.files import read_json_object
from assay.judge.dump_wording import (
    describe_finding,
    describe_missing,
    describe_resolution,
    describe_setting,
)
from assay.judge.levels import MOST_LISTED, Cause, LevelResult
from assay.models.config_files import TIED, flatten_settings, load_settings
from assay.models.inspect.config_keys import inert_keys
from assay.models.quantization.judging import WeightComparison, WeightResult
from assay.verdicts import Level, Location, Measurement, Outcome


def judge_weight_levels(
    comparison: WeightComparison, problems: Sequence[str] = ()
) -> dict[str, LevelResult]:
    """Judge the levels `completeness` and `weights`, with a measurement for each weight.

    problems: defects of the folders, which forbid PASS.
    """
    worst = comparison.findings[0] if comparison.findings else None
    location = None
    if worst and worst.cause != "shard":
        module = worst.weight.rpartition(".")[0]
        location = Location(phase="forward", module=module, parameter=worst.weight)
    return {
        "completeness": LevelResult(_judge_completeness(comparison, problems)),
        "weights": LevelResult(
            _judge_weights(comparison),
            [_row(one, order) for order, one in enumerate(comparison.results)],
            _list_notes(comparison),
            cause=Cause("weight-mismatch", location),
        ),
    }


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


def find_other_settings(
    expected: Path, actual: Path, held: tuple[AbstractSet[object], AbstractSet[object]]
) -> list[tuple[str, Outcome]]:
    """Describe each key of config.json that differs; FAIL changes a result, NOT_COMPARED may, PASS does not.

    held: what identifies the weights of each folder.
    """
    raw = [flatten_settings(read_json_object(one / "config.json")) for one in (expected, actual)]
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
            (values[0] is True and not held[1] <= held[0])
            or (values[1] is True and not held[0] <= held[1])
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


def judge_settings(found: Sequence[tuple[str, Outcome]]) -> LevelResult | None:
    """Judge the level `config` for keys that differ; return None without one."""
    if not found:
        return None
    certain, doubtful, others = ([text for text, kind in found if kind == one] for one in (
        Outcome.FAIL, Outcome.NOT_COMPARED, Outcome.PASS,
    ))  # fmt: skip
    outcome = Outcome.FAIL if certain else Outcome.NOT_COMPARED if doubtful else Outcome.PASS
    reason = "; ".join([*certain, *doubtful]) or None
    return LevelResult(
        Level(verdict=outcome, reason=reason), notes=others, cause=Cause("checkpoint-mismatch")
    )
