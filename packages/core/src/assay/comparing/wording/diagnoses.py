"""The meaning of each diagnosis, from `diagnoses.toml`."""

import difflib
from functools import cache
from pathlib import Path

from assay.errors import UsageError
from assay.files import read_toml
from assay.verdicts import Outcome, Record


class DiagnosisEntry(Record):
    """One entry of diagnoses.toml."""

    verdict: Outcome
    summary: str
    summary_without_place: str = ""
    """The summary for a verdict without a place; "" for the same."""
    meaning: str
    causes: list[str]
    advice: str


@cache
def load_diagnoses() -> dict[str, DiagnosisEntry]:
    """Load all diagnoses, by name."""
    entries = read_toml(Path(__file__).with_name("diagnoses.toml"))
    return {name: DiagnosisEntry.model_validate(entry) for name, entry in entries.items()}


def find_diagnosis(name: str) -> DiagnosisEntry:
    """Return the entry of diagnosis `name`.

    Raises: UsageError for an unknown name, with the nearest one.
    """
    diagnoses = load_diagnoses()
    if name in diagnoses:
        return diagnoses[name]
    near = difflib.get_close_matches(name, diagnoses, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(diagnoses)}"
    raise UsageError(f"unknown diagnosis {name!r}{hint}")


def describe_diagnosis(name: str) -> str:
    """Return the text of `assay explain` for one diagnosis, in paragraphs.

    Raises: UsageError for an unknown name.
    """
    entry = find_diagnosis(name)
    return "\n\n".join([
        f"{name} ({entry.verdict.value}): {entry.summary}.",
        entry.meaning.strip(),
        f"Typical causes: {'; '.join(entry.causes)}.",
        f"What to do next: {entry.advice.strip()}",
    ])  # fmt: skip


def list_diagnoses() -> list[tuple[str, str, str]]:
    """Return name, verdict and summary of every diagnosis."""
    return [(name, entry.verdict.value, entry.summary) for name, entry in load_diagnoses().items()]
