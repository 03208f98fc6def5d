"""Both sides of a training check, as the processes left them."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from assay.comparing.coverage import ComparedStages, CoverageParts, judge_coverage
from assay.comparing.limits import Limits
from assay.comparing.stored_results import read_results
from assay.comparing.wording.coverage import notes_on_coverage
from assay.dtypes import float_format
from assay.trace import Trace
from assay.training.judging.rank_reports import merge_reports
from assay.training.processes.requests import (
    CandidateReport,
    LogitGradientScale,
    ReferenceReport,
    TrainOptions,
)
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Coverage


@dataclass(frozen=True)
class FreeEvidence:
    """Both sides of a run of which nothing is replaced, and the limits by which it is judged.

    reports: of each rank of the candidate, by rank.
    """

    options: TrainOptions
    dtype: str
    reference: ReferenceReport
    reports: list[CandidateReport]
    limits: Limits

    @property
    def on_ranks(self) -> bool:
        """Whether the candidate is several processes."""
        return len(self.reports) > 1

    @cached_property
    def report(self) -> CandidateReport:
        """The reports of all ranks as one."""
        return merge_reports(self.reports)

    @property
    def unit_roundoff(self) -> float:
        """That of the candidate's dtype."""
        return float_format(self.dtype).unit_roundoff


@dataclass(frozen=True, kw_only=True)
class TrainEvidence(FreeEvidence):
    """Both sides of a check: the free run, and every stage of its steps by itself.

    noise: measurements of the noise run. candidates: those of each rank of the candidate.
    allow_unused: GLOBs of parts that may stay uncompared.
    scaled: measurements of its ranks in a second replay, with the loss scale divided out. Empty
        without such a replay, or if `candidates` hold these measurements.
    """

    noise: Trace
    candidates: list[Trace]
    scaled: list[Trace] = field(default_factory=list)
    allow_unused: tuple[str, ...] = ()

    @cached_property
    def coverage(self) -> Coverage:
        """Judge how much of the model was compared, over all ranks."""
        measured = [read_results(trace, "modules") for trace in self.candidates]
        stages = ComparedStages.of(read_results(self.noise, "modules"), measured)
        used = self.reference.usage, self.report.usage
        return judge_coverage(
            CoverageParts(*used, stages, self.reference.untouched, self.allow_unused)
        )

    @property
    def notes(self) -> list[str]:
        """Collect the notes of the reference and on uncompared parts."""
        return [*self.reference.notes, *notes_on_coverage(self.coverage)]

    @cached_property
    def rows(self) -> RunRows:
        """Which rows of the run belong to which step."""
        return RunRows.of_counts(self.reference.num_rows)

    def without_loss_scale(self) -> "TrainEvidence | None":
        """The evidence of the second replay in place of the first; None where there is none."""
        if len(self.scaled) != len(self.candidates):
            return None
        reports = [
            report.model_copy(update={"logit_gradients": _without_scale(report)})
            for report in self.reports
        ]
        return replace(self, candidates=self.scaled, reports=reports, scaled=[])


def _without_scale(report: CandidateReport) -> list[LogitGradientScale]:
    """What is left of the scales of the loss's gradients, once the factors of the steps are off."""
    factors = {step.step: step.factor for step in report.scaled_steps}
    return [
        row.model_copy(
            update={
                "slope": (1 + row.slope) / factors[row.step] - 1,
                "rest": row.rest / factors[row.step],
            }
        )
        for row in report.logit_gradients
        if row.step in factors
    ]
