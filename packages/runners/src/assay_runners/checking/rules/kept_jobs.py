"""The jobs that are committed twice: in their workflow, and in `kept_jobs.yml`."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from assay_runners.checking.context import Context, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.rules.placeholders import fill, names_of
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.leaves import leaves, written

FILE = Path(__file__).with_name("kept_jobs.yml")
SHOWN_FILE = "packages/runners/src/assay_runners/checking/rules/kept_jobs.yml"
_SHOWN_WHOLE = 60


def kept_jobs(context: Context) -> Iterator[Finding]:
    """The jobs that everything rests on are what they are in the file."""
    rule = "kept"
    workflows = {document.name: document for document in context.workflows}
    for name, jobs in read_kept_jobs().items():
        document = workflows.get(name)
        for job, kept in jobs.items():
            if document is None or job not in document.jobs:
                file = f".github/workflows/{name}"
                yield Finding(file, 1, rule, f"there is no job {job}, as {SHOWN_FILE} has it")
            else:
                for line, problem in _differences(document, job, kept, context):
                    message = f"{problem}; if it is meant, edit {SHOWN_FILE} as well"
                    yield make_finding(rule, document, line, message)


def is_kept(file: str, place: str) -> bool:
    """Whether the value at this place is held to the file; display names are not."""
    parts = place.split(".")
    inside = len(parts) > 2 and parts[0] == "jobs" and parts[2:] != ["name"]
    return inside and parts[1] in read_kept_jobs().get(file, {})


@cache
def read_kept_jobs() -> dict[str, dict[str, Any]]:
    """By file and job."""
    kept: dict[str, dict[str, Any]] = YAML(typ="rt").load(FILE.read_text(encoding="utf-8"))
    return kept


def _differences(
    document: Document, job: str, kept: object, context: Context
) -> Iterator[tuple[int, str]]:
    names = names_of(context.fleet.github)
    expected = {
        leaf.shown: fill(value, names) if isinstance(value := written(leaf.value), str) else value
        for leaf in leaves(kept)
    }
    own = document.jobs[job]
    actual = {leaf.shown: leaf for leaf in leaves(own.raw)}
    for shown, leaf in actual.items():
        if shown not in expected and shown == "name":
            continue
        if shown not in expected:
            yield leaf.line, f"{job} has {shown}, which it must not have"
        elif (value := _without_commit(leaf.value)) != expected[shown]:
            yield leaf.line, f"{shown} of {job} is {_from_the_difference(value, expected[shown])}"
    for shown in expected.keys() - actual.keys():
        yield own.line, f"{job} has no {shown}: {expected[shown]!r}"


def _from_the_difference(actual: object, expected: object) -> str:
    """Both, the beginning that long ones share left out."""
    one, other = str(actual), str(expected)
    shared = next((n for n, (a, b) in enumerate(zip_longest(one, other)) if a != b), 0)
    start = shared if shared > _SHOWN_WHOLE else 0
    dots = "…" if start else ""
    return f"{dots + one[start:][:_SHOWN_WHOLE]!r}, not {dots + other[start:][:_SHOWN_WHOLE]!r}"


def _without_commit(value: object) -> object:
    text = written(value)
    return re.sub(r"@[0-9a-f]{40}$", "", text) if isinstance(text, str) else text
