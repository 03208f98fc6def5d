"""The answers of the worlds of a case, for its judges."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from assay.comparing.limits import Limits
from assay.training.judging.evidence import FreeEvidence
from assay.training.processes.requests import TrainOptions
from assay_smoke.cases.requests import ReadAnswer, ReferenceAnswer, StepsAnswer, TrainAnswer
from assay_smoke.cases.settings import options_of
from assay_smoke.machine.leftovers import Leftover
from assay_smoke.matrix.cases import Case


@dataclass(kw_only=True)
class CaseEvidence:
    """The answers of every world by rank, empty for a world that did not run, and their reference."""

    case: Case
    reference: ReferenceAnswer
    limits: Limits
    trained: list[TrainAnswer] = field(default_factory=list)
    terminated: list[StepsAnswer] = field(default_factory=list)
    resumed: list[StepsAnswer] = field(default_factory=list)
    restarted: list[StepsAnswer] = field(default_factory=list)
    read: ReadAnswer | None = None
    left_behind: list[Leftover] = field(default_factory=list)

    @cached_property
    def options(self) -> TrainOptions:
        """Return the training options."""
        return options_of(self.case)

    @cached_property
    def free(self) -> FreeEvidence:
        """Return the free run with its resumption in the same process."""
        return FreeEvidence(
            self.options,
            self.case.precision,
            self.reference.training,
            [answer.report for answer in self.trained],
            self.limits,
        )

    @cached_property
    def in_new_processes(self) -> FreeEvidence:
        """Return the free run with the resumption in new processes instead."""
        reports = []
        for rank, other in zip(self.trained, self.resumed, strict=True):
            held = {
                str(part): digest for step in rank.report.free.held[-1:] for part, digest in step
            }
            # Judged as the resumption in the same process, except for what only that one measures.
            free = replace(
                rank.report.free,
                resumed=other.steps,
                resumed_trajectory=other.trajectory,
                ended_otherwise=_different(held, other.held),
                problem=other.problem,
                not_restored=[],
                saved=[],
                changed_by_saving=[],
                settings=[],
            )
            reports.append(replace(rank.report, free=free))
        return replace(self.free, reports=reports)


def _different(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Return the names that differ or that only one side has. An empty `actual` ended too early."""
    if not actual:
        return []
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )
