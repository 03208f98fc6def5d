"""What every rule may read."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from assay_runners.checking.findings import Finding
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.expressions import expressions_in
from assay_runners.checking.workflow_files.leaves import Leaf, leaves
from assay_runners.checking.workflow_files.reach import Reach
from assay_runners.fleet.entries import Fleet


@dataclass(frozen=True)
class Context:
    """A repository as the rules see it.

    sessions: the nox sessions that there are.
    """

    workflows: tuple[Document, ...]
    actions: tuple[Document, ...]
    reach: Reach
    fleet: Fleet
    sessions: Collection[str]

    @property
    def documents(self) -> tuple[Document, ...]:
        """Workflows and actions."""
        return self.workflows + self.actions

    @property
    def accelerator(self) -> str:
        """How a job calls the one workflow that the machines' group takes."""
        github = self.fleet.github
        path = f"{github.repository}/.github/workflows/accelerator.yml"
        return f"{path}@{github.protected_ref}"


def make_finding(rule: str, document: Document, line: int, message: str) -> Finding:
    """A finding of `rule` in `document`."""
    return Finding(document.file, line, rule, message)


def expressions_of(document: Document) -> Iterator[tuple[Leaf, str]]:
    """Every expression of a document, normalised, with the value that it stands in."""
    for leaf in leaves(document.raw):
        if isinstance(leaf.value, str):
            for expression in expressions_in(leaf.value, is_condition=leaf.key == "if"):
                yield leaf, expression
