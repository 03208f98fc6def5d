"""Everything that the worlds of a case answered, as its judges see it."""

from dataclasses import dataclass
from functools import cached_property

from assay.comparing.limits import Limits
from assay.training.judging.evidence import FreeEvidence
from assay_smoke.cases.requests import (
    CaseRequest,
    ReadAnswer,
    ReferenceAnswer,
    RestartAnswer,
    ResumeAnswer,
    TerminateAnswer,
    TrainAnswer,
)
from assay_smoke.machine.leftovers import Leftover


@dataclass(frozen=True)
class Answers:
    """What each world of a case answered, by rank; a world that was not run has none."""

    request: CaseRequest
    trained: list[TrainAnswer]
    terminated: list[TerminateAnswer]
    resumed: list[ResumeAnswer]
    restarted: list[RestartAnswer]
    read: ReadAnswer | None


@dataclass(frozen=True, kw_only=True)
class CaseEvidence(Answers):
    """The answers, what they are held to, and what the worlds left on the machine.

    dtype: of the run that is judged.
    """

    dtype: str
    reference: ReferenceAnswer
    left_behind: list[Leftover]
    limits: Limits

    @cached_property
    def free(self) -> FreeEvidence:
        """The free run, and its resumption in the same process."""
        return FreeEvidence(
            self.request.candidate.options,
            self.dtype,
            self.reference.training,
            [answer.report for answer in self.trained],
            self.limits,
        )

    @cached_property
    def in_new_processes(self) -> FreeEvidence:
        """The free run, with what new processes made of its checkpoint in place of its own resumption."""
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
        free = self.free
        return FreeEvidence(free.options, free.dtype, free.reference, reports, free.limits)


def _different(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Names of what only one side has, or what differs; nothing of a side that never came so far."""
    if not actual:
        return []
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )
