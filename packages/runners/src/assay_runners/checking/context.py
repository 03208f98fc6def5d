"""The input of a rule and its output: the repository, with the call graph of its workflows."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from assay_runners.checking.workflow_documents import Document
from assay_runners.fleet.entries import Fleet

# A line that breaks a rule, from 1, and the problem with what to write instead.
Problem = tuple[int, str]


@dataclass(frozen=True)
class CallGraph:
    """All workflows of a repository and their calls."""

    workflows: tuple[Document, ...]

    @cached_property
    def callers(self) -> dict[str, set[str]]:
        """By file name, the workflow itself and all its direct and indirect callers."""
        direct: dict[str, set[str]] = {workflow.name: set() for workflow in self.workflows}
        for workflow in self.workflows:
            for job in workflow.jobs.values():
                called = called_file(job.uses)
                if called in direct:
                    direct[called].add(workflow.name)
        found = {name: {name, *above} for name, above in direct.items()}
        for _ in self.workflows:
            for above in found.values():
                above.update(*(direct[name] for name in sorted(above)))
        return found

    def find_starters(self, workflow: Document) -> list[Document]:
        """Find the workflows whose events reach it."""
        names = self.callers[workflow.name]
        return [other for other in self.workflows if other.name in names]

    def is_reached_by(self, workflow: Document, event: str) -> bool:
        """Check that `event` starts it or one of its callers."""
        return any(event in other.events for other in self.find_starters(workflow))

    def is_reached_by_label(self, workflow: Document) -> bool:
        """Check that a label given to a pull request reaches it."""
        starters = self.find_starters(workflow)
        labeled = any("labeled" in other.types("pull_request") for other in starters)
        return labeled or self._is_for_other_repositories(workflow)

    def _is_for_other_repositories(self, workflow: Document) -> bool:
        """Check that it can be called and no workflow here calls it. A pull request may call it there."""
        is_only_called = set(workflow.events) == {"workflow_call"}
        return is_only_called and self.find_starters(workflow) == [workflow]


def called_file(uses: str) -> str:
    """Return the file name of the workflow that a job calls; "" if it calls none."""
    path = uses.partition("@")[0]
    return path.rsplit("/", 1)[-1] if "/.github/workflows/" in path else ""


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
