"""The input of a rule and its output."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from assay_runners.checking.workflow_files.call_graph import CallGraph
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.expressions import expressions_in
from assay_runners.checking.workflow_files.scalars import Scalar, find_scalars
from assay_runners.fleet.entries import Fleet

# A line that breaks a rule, from 1, and the problem with what to write instead.
Problem = tuple[int, str]


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


def expressions_of(document: Document) -> Iterator[tuple[Scalar, str]]:
    """Yield every expression of a document, normalized, with the value around it."""
    for scalar in find_scalars(document.raw):
        if isinstance(scalar.value, str):
            for expression in expressions_in(scalar.value, is_condition=scalar.key == "if"):
                yield scalar, expression
