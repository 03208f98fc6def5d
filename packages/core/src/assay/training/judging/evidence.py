"""The evidence of both sides of a training check, as their processes left it, merged over ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from assay.comparing.coverage import ComparedStages, CoverageParts, Usage, judge_coverage
from assay.comparing.limits import Limits
from assay.comparing.results import ReplayResults, read_results
from assay.comparing.wording.coverage import notes_on_coverage
from assay.dtypes import float_format
from assay.locating.loss_scale import GradientScale
from assay.statistics import worst_error
from assay.trace import Trace
from assay.training.processes.requests import ReferenceReport, TrainOptions
from assay.training.processes.skipped_steps import MOST_SKIPPED
from assay.training.processes.trainer_report import FreeRun, TrainerReport
from assay.training.replay.observing.update_watch import MovedElements
from assay.training.replay.run_rows import RunRows
from assay.training.state.precision import KeptPrecision
from assay.verdicts import Coverage


def merge_reports(reports: Sequence[TrainerReport]) -> TrainerReport:
    """Return one report for all ranks: an error on one rank is an error of the run."""
    first = reports[0]
    traits, models = [one.traits for one in reports], [one.model for one in reports]
    replays, losses = [one.replay for one in reports], [one.loss for one in reports]
    gradients, optimizers = [r.gradients for r in reports], [r.optimizer for r in reports]
    update = {
        "free": _merge_runs([report.free for report in reports]),
        "traits": replace(
            first.traits,
            invisible={k: v for one in traits for k, v in one.invisible.items()},
            **_unions(traits, "partial_modules", "unmeasured", "notes"),
        ),
        "model": replace(
            first.model,
            shared=_common(models, "shared"),
            **_unions(models, "weights_different", "adapter_start"),
        ),
        "replay": replace(
            first.replay,
            seen=_common(replays, "seen"),
            # A rank whose share is a single row has nothing to pack.
            unapplied=_common(replays, "unapplied"),
            usage=Usage.of_ranks([one.usage for one in replays]),
            **_unions(replays, "packed", "not_loaded", "changed_by_skipping"),
        ),
        "loss": replace(first.loss, **_unions(losses, "logit_gradients", "labels", "scaled_steps")),
        "gradients": replace(
            first.gradients,
            drew_in_backward=any(one.drew_in_backward for one in gradients),
            errors_of_sums=_worst([one.errors_of_sums for one in gradients]),
            changed=_worst([one.changed for one in gradients]),
            **_unions(gradients, "kept"),
            sharded_gradients=sum(one.sharded_gradients for one in gradients),
            narrow_gradients=sum(one.narrow_gradients for one in gradients),
        ),
        "optimizer": replace(
            first.optimizer,
            moved=MovedElements(
                sum(one.moved.num_expected for one in optimizers),
                sum(one.moved.num_moved for one in optimizers),
            ),
            **_unions(optimizers, "not_in_optimizer", "frozen", "unexpectedly_trained"),
        ),
    }
    return first.model_copy(update=update)


def _merge_runs(runs: Sequence[FreeRun]) -> FreeRun:
    """Return the run of the first rank, with the errors of all ranks."""
    problems = [run.problem for run in runs if run.problem is not None]
    kept = [run.kept for run in runs if run.kept is not None]
    names = [one.name for one in fields(KeptPrecision)]
    update = {
        "problem": problems[0] if problems else None,
        "kept": KeptPrecision(**_unions(kept, *names)) if kept else None,
    }
    update |= _unions(
        runs, "saved", "settings", "changed_by_saving", "not_restored", "ended_otherwise", "notes"
    )
    return runs[0].model_copy(update=update)


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for of_rank in errors:
        for name, error in of_rank.items():
            worst[name] = worst_error([error, worst.get(name, 0.0)])
    return worst


def _common(items: Sequence[Any], name: str) -> list[Any]:
    return [v for v in getattr(items[0], name) if all(v in getattr(one, name) for one in items)]


def _unions(items: Sequence[Any], *names: str) -> dict[str, Any]:
    """Return for each name the values of all items' lists of that name, without repetitions."""
    found: dict[str, Any] = {name: [] for name in names}
    for name, values in found.items():
        for item in items:
            values += [value for value in getattr(item, name) if value not in values]
    return found


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
        names = ", ".join(name or "(model)" for name in report.traits.partial_modules)
        notes = [
            f"no rank has all of {names}: their own code is not measured, what is inside of them is",
            "losses of single micro-batches are not visible",
        ]
    if report.traits.unmeasured:
        declared = ", ".join(report.traits.unmeasured)
        notes.append(f"declared absent, or of no effect; not measured: {declared}")
    return notes
