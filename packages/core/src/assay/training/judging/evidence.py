"""The evidence of both sides of a training check, as their processes left it, merged over ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from assay.comparing.coverage import (
    ComparedStages,
    CoverageParts,
    Usage,
    judge_coverage,
    notes_on_coverage,
)
from assay.comparing.limits import Limits
from assay.comparing.results import ReplayResults, read_results
from assay.dtypes import float_format
from assay.locating.gradients import GradientScale
from assay.statistics import worst_error
from assay.trace import Trace
from assay.training.processes.requests import ReferenceReport, TrainOptions
from assay.training.processes.skipped_steps import MOST_SKIPPED
from assay.training.processes.trainer_report import TrainerReport
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Coverage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


R = TypeVar("R", bound="DataclassInstance")


def merge_reports(reports: Sequence[R]) -> R:
    """Return one report for all ranks: an error on one rank is an error of the run.

    Records are merged by field. Other fields are merged in the way of their name, or are those of rank 0.
    """
    merged: dict[str, Any] = {}
    for one in fields(reports[0]):
        of_ranks = [getattr(report, one.name) for report in reports]
        if values := [value for value in of_ranks if value is not None]:
            merge = merge_reports if is_dataclass(values[0]) else _MERGES.get(one.name)
            merged |= {one.name: merge(values)} if merge is not None else {}
    return replace(reports[0], **merged)


def _union(lists: Sequence[Iterable[Any]]) -> list[Any]:
    found: list[Any] = []
    for value in chain.from_iterable(lists):
        found += [value] if value not in found else []
    return found


def _common(lists: Sequence[Iterable[Any]]) -> list[Any]:
    return [value for value in lists[0] if all(value in other for other in lists)]


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = chain.from_iterable(errors)
    return {name: worst_error(one[name] for one in errors if name in one) for name in names}


# A rank whose share is a single row has nothing to pack: a feature is unapplied on all ranks.
_MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys((
        "partial_modules", "unmeasured_ports", "notes", "weights_different", "adapter_start",
        "packed", "not_loaded", "changed_by_skipping", "logit_gradients", "labels",
        "scaled_steps", "not_in_optimizer", "frozen", "unexpectedly_trained", "saved",
        "settings", "changed_by_saving", "not_restored", "ended_otherwise", "parameters",
        "copied", "moments", "rounded", "kept",
    ), _union),
    **dict.fromkeys(("shared", "seen", "unapplied"), _common),
    **dict.fromkeys(("errors_of_sums", "changed"), _worst),
    **dict.fromkeys(
        ("sharded_gradients", "narrow_gradients", "num_expected", "num_moved"), sum
    ),
    "drew_in_backward": any,
    "invisible_phases": lambda phases: {k: v for one in phases for k, v in one.items()},
    "problem": lambda problems: next(iter(problems), None),
    "usage": Usage.of_ranks,
}  # fmt: skip


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
    measure_in_float32: Callable[[], ReplayResults] | None = None
    """Measure updates and moments of an optimizer in float32, which mixed precision is judged by."""

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
        """Collect the notes of the reference and the trainer, and on uncompared parts."""
        notes = [*self.reference.notes, *notes_on_coverage(self.coverage)]
        return [*notes, *self.report.traits.notes]

    @cached_property
    def rows(self) -> RunRows:
        """Map the rows of the run to steps and micro-batches."""
        return RunRows.of_counts(self.reference.num_rows)

    def without_loss_scale(self) -> "TrainEvidence | None":
        """Return the evidence with the second replay in place of the first, if there is one."""
        if len(self.scaled) != len(self.candidates):
            return None
        reports = [
            replace(one, loss=replace(one.loss, logit_gradients=_without_scale(one)))
            for one in self.reports
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


def notes_on_steps(report: TrainerReport) -> list[str]:
    """Note skipped steps, and micro-batches that run as one."""
    notes = [
        f"micro-batches {', '.join(map(str, numbers))} of a step are run as one: what the reference has"
        " of each is put together row by row"
        for numbers in report.replay.packed
        if len(numbers) > 1
    ]
    for number, step in enumerate(report.free.steps):
        if step.num_skipped > MOST_SKIPPED:
            notes.append(
                f"step {number} was never made: the trainer skipped it {MOST_SKIPPED} times"
            )
        elif step.num_skipped:
            notes.append(
                f"step {number} was skipped {step.num_skipped} times before it was made, as the"
                " trainer reports: its batch was given again"
            )
    return notes


def notes_on_unmeasured(report: TrainerReport) -> list[str]:
    """Note declared parts that are not measured, so that every omission is reported."""
    notes = []
    if report.traits.partial_modules:
        names = ", ".join(name or "(model)" for name in sorted(report.traits.partial_modules))
        notes = [
            f"no rank has all of {names}: their own code is not measured, what is inside of them is",
            "losses of single micro-batches are not visible",
        ]
    if ports := report.traits.unmeasured_ports:
        declared = ", ".join(sorted(f"{module or '(model)'}:{port}" for module, port in ports))
        notes.append(f"declared absent, or of no effect; not measured: {declared}")
    return notes
