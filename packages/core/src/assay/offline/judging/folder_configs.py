"""The comparison of two model folders' configurations, which equal weights do not imply."""

import re
from typing import Any

from assay.comparing.dump_wording import describe_setting, headline_of_settings
from assay.comparing.levels import outcome_of_levels
from assay.dumps.protocol import Dump
from assay.dumps.readers.model_folder import TIED, flatten_settings, load_settings
from assay.files import read_json_object
from assay.models.inspect.config_keys import inert_keys
from assay.verdicts import Level, Outcome, Verdict

_MODEL = "model"
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
