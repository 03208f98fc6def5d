"""Describe wrong labels: what is wrong with them, and in which rows."""

from collections.abc import Sequence

from assay.judge.levels import DiagnosedFault
from assay.replay.gradients import LabelDifference
from assay.training.judging.evidence import describe_steps
from assay.verdicts import Location

_LABEL_FAULTS = {
    "not-shifted": "{count} labels are not shifted: each position is trained on its own token, not on"
    " the next one",
    "shifted-twice": "{count} labels are shifted twice: each position is trained on the token after the"
    " next one",
    "prompt": "prompts are trained on: {count} of their tokens are labels, which the reference masks",
    "padding": "padding is trained on: {count} labels, which the reference masks",
    "masked": "{count} labels are masked that the reference trains on",
    "other": "{count} labels are other tokens than the reference's",
}


def find_wrong_labels(labels: Sequence[LabelDifference]) -> DiagnosedFault | None:
    """Describe wrong labels and their rows. Return None if all labels agree."""
    if not labels:
        return None
    facts = []
    for fault, words in _LABEL_FAULTS.items():
        found = [one for one in labels if one.fault == fault]
        if found:
            count = sum(one.count for one in found)
            facts.append(f"{words.format(count=f'{count:,}')} ({_describe_rows(found)})")
    step = min(one.step for one in labels)
    location = Location(phase="inputs", step=step, module="")
    return DiagnosedFault("inputs-differ", location, f"labels: {'; '.join(facts)}")


def _describe_rows(labels: Sequence[LabelDifference]) -> str:
    """Describe the rows of the first step of `labels`, and the number of later steps."""
    first = min(one.step for one in labels)
    rows: dict[int, list[str]] = {}
    for one in sorted(labels, key=lambda one: (one.micro_batch, one.row)):
        if one.step == first and str(one.row) not in rows.setdefault(one.micro_batch, []):
            rows[one.micro_batch].append(str(one.row))
    places = ", ".join(
        f"micro-batch {number} row{'s' if len(found) > 1 else ''} {' and '.join(found)}"
        for number, found in rows.items()
    )
    return f"{places} of {describe_steps(one.step for one in labels)}"
