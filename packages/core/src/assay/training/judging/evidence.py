"""Both sides of a training check, as the processes left them."""

from dataclasses import dataclass
from functools import cached_property

from assay.comparing.limits import Limits
from assay.dtypes import float_format
from assay.trace import Trace
from assay.training.judging.rank_reports import merge_reports
from assay.training.processes.requests import CandidateReport, ReferenceReport, TrainOptions
from assay.training.replay.run_rows import RunRows


@dataclass(frozen=True)
class TrainEvidence:
    """Both sides of a check, and the limits by which it is judged.

    reports, candidates: of each rank of the candidate, by rank.
    """

    options: TrainOptions
    dtype: str
    reference: ReferenceReport
    reports: list[CandidateReport]
    noise: Trace
    candidates: list[Trace]
    limits: Limits

    @property
    def on_ranks(self) -> bool:
        """Whether the candidate is several processes."""
        return len(self.reports) > 1

    @cached_property
    def report(self) -> CandidateReport:
        """The reports of all ranks as one."""
        return merge_reports(self.reports)

    @cached_property
    def rows(self) -> RunRows:
        """Which rows of the run belong to which step."""
        return RunRows.of_counts(self.reference.num_rows)

    @property
    def unit_roundoff(self) -> float:
        """That of the candidate's dtype."""
        return float_format(self.dtype).unit_roundoff
