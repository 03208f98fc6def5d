"""The evidence of both sides of a training check, as their processes left it."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from assay.comparing.coverage import ComparedStages, CoverageParts, judge_coverage
from assay.comparing.limits import Limits
from assay.comparing.results import read_results
from assay.comparing.wording.coverage import notes_on_coverage
from assay.dtypes import float_format
from assay.locating.loss_scale import GradientScale
from assay.trace import Trace
from assay.training.judging.rank_reports import merge_reports
from assay.training.processes.requests import ReferenceReport, TrainOptions
from assay.training.processes.trainer_report import TrainerReport
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Coverage


@dataclass(frozen=True)
class FreeEvidence:
    """Evidence of a run without injection, and the limits by which it is judged."""

    options: TrainOptions
    dtype: str
    reference: ReferenceReport
    reports: list[TrainerReport]
    """Of the candidate, one for each rank."""
    limits: Limits

    @property
    def on_ranks(self) -> bool:
        """Return True if the candidate has several ranks."""
        return len(self.reports) > 1

    @cached_property
    def report(self) -> TrainerReport:
        """Merge the reports of all ranks."""
        return merge_reports(self.reports)

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff of the candidate's dtype."""
        return float_format(self.dtype).unit_roundoff


@dataclass(frozen=True, kw_only=True)
class TrainEvidence(FreeEvidence):
    """Evidence of a whole check: the free run, and each stage of its steps by itself."""

    noise: Trace
    """Measurements of the noise run."""
    candidates: list[Trace]
    """Measurements of the candidate, one trace for each rank."""
    scaled: list[Trace] = field(default_factory=list)
    """The same from a second replay, with the loss scale divided out.

    Empty without such a replay, or if `candidates` hold these measurements.
    """
    allow_unused: tuple[str, ...] = ()
    """GLOBs of parts that may stay uncompared."""

    @cached_property
    def coverage(self) -> Coverage:
        """Judge how much of the model was compared, over all ranks."""
        measured = [read_results(trace, "modules") for trace in self.candidates]
        stages = ComparedStages.of(read_results(self.noise, "modules"), measured)
        used = self.reference.usage, self.report.replay.usage
        return judge_coverage(
            CoverageParts(*used, stages, self.reference.untouched, self.allow_unused)
        )

    @property
    def notes(self) -> list[str]:
        """Collect the notes of the reference and on uncompared parts."""
        return [*self.reference.notes, *notes_on_coverage(self.coverage)]

    @cached_property
    def rows(self) -> RunRows:
        """Map the rows of the run to steps and micro-batches."""
        return RunRows.of_counts(self.reference.num_rows)

    def without_loss_scale(self) -> "TrainEvidence | None":
        """Return the evidence with the second replay in place of the first, if there is one."""
        if len(self.scaled) != len(self.candidates):
            return None
        reports = [
            report.model_copy(
                update={"loss": replace(report.loss, logit_gradients=_without_scale(report))}
            )
            for report in self.reports
        ]
        return replace(self, candidates=self.scaled, reports=reports, scaled=[])


def _without_scale(report: TrainerReport) -> list[GradientScale]:
    """Divide the factors of the steps out of the scales of the loss gradients."""
    factors = {step.step: step.factor for step in report.loss.scaled_steps}
    return [
        replace(
            row,
            slope=(1 + row.slope) / factors[row.step] - 1,
            rest=row.rest / factors[row.step],
        )
        for row in report.loss.logit_gradients
        if row.step in factors
    ]
