"""The input and the output of a rule."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from assay_runners.checking.workflow_files.call_graph import CallGraph
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.expressions import expressions_in
from assay_runners.checking.workflow_files.scalars import Scalar, find_scalars
from assay_runners.fleet.entries import Fleet


@dataclass(frozen=True, order=True)
class Finding:
    """A place that breaks a rule."""

    file: str
    """Relative to the root of the repository."""
    line: int
    """The first line is 1."""
    rule: str
    message: str
    """The problem, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Context:
    """A repository as the rules see it."""

    workflows: tuple[Document, ...]
    actions: tuple[Document, ...]
    calls: CallGraph
    fleet: Fleet
    sessions: Collection[str]
    """The sessions of the noxfile."""

    @property
    def documents(self) -> tuple[Document, ...]:
        """Workflows and actions."""
        return self.workflows + self.actions

    @property
    def accelerator(self) -> str:
        """The `uses` of a call of accelerator.yml, the one workflow that the runner group accepts."""
        github = self.fleet.github
        path = f"{github.repository}/.github/workflows/accelerator.yml"
        return f"{path}@{github.protected_ref}"


def make_finding(rule: str, document: Document, line: int, message: str) -> Finding:
    """Make a finding in `document`."""
    return Finding(document.file, line, rule, message)


def expressions_of(document: Document) -> Iterator[tuple[Scalar, str]]:
    """Yield every expression of a document, normalized, with the value around it."""
    for scalar in find_scalars(document.raw):
        if isinstance(scalar.value, str):
            for expression in expressions_in(scalar.value, is_condition=scalar.key == "if"):
                yield scalar, expression
