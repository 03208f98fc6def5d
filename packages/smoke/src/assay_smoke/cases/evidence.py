"""The answers of the worlds of a case, for its judges."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from assay.comparing.limits import Limits
from assay.training.judging.evidence import FreeEvidence
from assay.training.processes.requests import StepRecord
from assay_smoke.cases.requests import (
    CaseRequest,
    ReadAnswer,
    ReferenceAnswer,
    ResumeAnswer,
    TerminateAnswer,
    TrainAnswer,
)
from assay_smoke.machine.leftovers import Leftover


@dataclass(kw_only=True)
class CaseEvidence:
    """The answers of every world by rank, empty for a world that did not run, and their reference."""

    request: CaseRequest
    dtype: str
    """Dtype of the judged run."""
    reference: ReferenceAnswer
    limits: Limits
    trained: list[TrainAnswer] = field(default_factory=list)
    terminated: list[TerminateAnswer] = field(default_factory=list)
    resumed: list[ResumeAnswer] = field(default_factory=list)
    restarted: list[StepRecord] = field(default_factory=list)
    read: ReadAnswer | None = None
    left_behind: list[Leftover] = field(default_factory=list)

    @cached_property
    def free(self) -> FreeEvidence:
        """Return the free run with its resumption in the same process."""
        return FreeEvidence(
            self.request.candidate.options,
            self.dtype,
            self.reference.training,
            [answer.report for answer in self.trained],
            self.limits,
        )

    @cached_property
    def in_new_processes(self) -> FreeEvidence:
        """Return the free run with the resumption in new processes instead."""
        reports = [
            one.report.model_copy(
                update={
                    "free": one.report.free.model_copy(
                        update={
                            "resumed": other.steps,
                            "resumed_trajectory": other.trajectory,
                            "ended_otherwise": _different(one.held, other.held),
                            "problem": other.problem,
                            "not_restored": [],
                            "saved": [],
                            "changed_by_saving": [],
                            "settings": [],
                        }
                    )
                }
            )
            for one, other in zip(self.trained, self.resumed, strict=True)
        ]
        return replace(self.free, reports=reports)


def _different(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Return the names that differ or that only one side has. An empty `actual` ended too early."""
    if not actual:
        return []
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )
