"""Which events reach which workflow, through the workflows that call it."""

from dataclasses import dataclass
from functools import cached_property

from assay_runners.checking.workflow_files.documents import Document

# Events whose payload, and mostly whose code, is written by whoever opens a pull request.
OF_OTHERS = ("pull_request", "pull_request_target", "merge_group")


@dataclass(frozen=True)
class Reach:
    """All workflows of a repository, and who calls whom."""

    workflows: tuple[Document, ...]

    @cached_property
    def callers(self) -> dict[str, set[str]]:
        """By file name, the workflows that call it, itself included, directly or not."""
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

    def starters(self, workflow: Document) -> list[Document]:
        """The workflows whose events reach it."""
        names = self.callers[workflow.name]
        return [other for other in self.workflows if other.name in names]

    def is_reached_by(self, workflow: Document, *events: str) -> bool:
        """Whether one of `events` starts it or one of its callers; what others call, a pull request may."""
        if "pull_request" in events and self._is_for_others(workflow):
            return True
        return any(event in other.events for other in self.starters(workflow) for event in events)

    def is_reached_by_label(self, workflow: Document) -> bool:
        """Whether a label given to a pull request reaches it."""
        starters = self.starters(workflow)
        labelled = any("labeled" in other.types("pull_request") for other in starters)
        return labelled or self._is_for_others(workflow)

    def _is_for_others(self, workflow: Document) -> bool:
        """Whether nobody here calls what is there to be called."""
        return set(workflow.events) == {"workflow_call"} and self.starters(workflow) == [workflow]


def called_file(uses: str) -> str:
    """The file name of the workflow that a job calls; "" where it calls none."""
    path = uses.partition("@")[0]
    return path.rsplit("/", 1)[-1] if "/.github/workflows/" in path else ""
