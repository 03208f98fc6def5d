"""The evidence of both sides of a training check, merged over ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from assay.dtypes import float_format
from assay.judge.coverage import (
    ComparedStages,
    CoverageParts,
    Usage,
    judge_coverage,
    notes_on_coverage,
)
from assay.judge.limits import Limits
from assay.judge.replays import FailedStage, Judged
from assay.judge.results import ReplayResults, read_results
from assay.metrics import RowErrors
from assay.replay.gradients import GradientScale
from assay.sites import Phase
from assay.statistics import OF_INTEGERS, STATISTICS, worst_error
from assay.trace import Trace
from assay.training.processes.free_run import MOST_SKIPPED
from assay.training.protocol import OtherSetting
from assay.training.replay.step_values import RunRows
from assay.training.reports import ReferenceReport, TrainerReport, TrainOptions
from assay.verdicts import Coverage, Location, Measurement

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


PARAMETER_PREFIX = "gradient."
UPDATE_PREFIX = "update."

# The port that stands for the updates of all parameters.
UPDATES = "update"


def is_made_by_loss(module: str, port: str) -> bool:
    """Return True for the model's result, whose gradient is computed by the loss."""
    return module == "" and port.startswith("output")


def measurement_of(level: str, item: Judged, rows: RunRows) -> Measurement:
    """Return the row of measurements.jsonl for one judged statistic."""
    step = first_bad_step(item, rows) if item.failed else 0
    return item.measurement(level, **item.port.place, step=step)


def describe_steps(steps: Iterable[int]) -> str:
    """Describe the first of `steps` and the number of later ones."""
    first, *later = sorted(set(steps))
    return f"step {first}, and {len(later)} later" if later else f"step {first}"


def first_bad_step(item: Judged, run_rows: RunRows) -> int:
    """Return the first of `bad_steps`."""
    return bad_steps(item, run_rows)[0]


def bad_steps(item: Judged, run_rows: RunRows) -> list[int]:
    """Return the steps with an error over the limit, or of at least half the largest."""
    first, _ = item.port.exact.first
    statistic = item.statistic
    if statistic in OF_INTEGERS and first >= 0:
        return [run_rows.step_of(first)]
    rows = RowErrors.concatenate(item.port.sums.rows)
    if statistic == "replay-tensor":  # of a step's rows together, which their norms give
        error, expected = norms_by_step(rows, run_rows)
        of_steps = (error / expected).where(error != 0, 0.0)
    else:
        of_steps = torch.zeros(len(run_rows.step_starts), dtype=rows.error.dtype)
        of_steps = of_steps.scatter_reduce(0, _steps_of(rows, run_rows), rows.relative(), "amax")
    of_steps = of_steps.nan_to_num(torch.inf, torch.inf)
    # An error of one form in all rows, such as a scale, is over its limit in no single step.
    allowed = item.limit * item.expected if STATISTICS[statistic].is_general else torch.inf
    bad = (of_steps > allowed) | (of_steps >= of_steps.max() / 2)
    return bad.nonzero()[:, 0].tolist() if bool(of_steps.any()) else [0]


def norms_by_step(rows: RowErrors, run_rows: RunRows) -> Tensor:
    """Return the norms of the errors and of the expected values of each step, (2, number of steps)."""
    squares = torch.stack([rows.error, rows.expected]).square()
    sums = torch.zeros(2, len(run_rows.step_starts), dtype=squares.dtype)
    return sums.index_add(1, _steps_of(rows, run_rows), squares).sqrt()


def _steps_of(rows: RowErrors, run_rows: RunRows) -> Tensor:
    # Values that belong to no prompt, such as rotary tables, have row number -1.
    starts = torch.tensor(run_rows.step_starts)
    return (torch.bucketize(rows.prompt.contiguous(), starts, right=True) - 1).clamp(min=0)


def location_of(failed: FailedStage, judged: list[Judged], rows: RunRows) -> Location:
    """Return phase, module and parameter of a stage; `judged` holds all its failed statistics."""
    own = [item for item in judged if item.failed and item.port.stage == failed.stage]
    gradients = [item for item in own if item.port.port.startswith(PARAMETER_PREFIX)]
    reported, phase = failed.reported.port, failed.stage.phase
    parameter = None
    if phase == "optimizer":
        parameter = parameter_of(failed.reported) or None
    elif gradients:
        parameter = parameter_of(max(gradients, key=lambda item: item.severity))
    of_loss = is_made_by_loss(reported.module, reported.port) or (
        (reported.module, reported.port) == ("", "loss")
    )
    return Location(
        phase=phase,
        step=first_bad_step(failed.reported, rows),
        rank=reported.rank,
        module=failed.stage.module,
        op="loss" if of_loss and phase in ("forward", "backward") else None,
        parameter=parameter,
    )


def location_of_parameter(phase: Phase, parameter: str | None, step: int = 0) -> Location:
    """Return the location of a parameter in `phase`; None stands for no single parameter."""
    module = None if parameter is None else parameter.rpartition(".")[0]
    return Location(phase=phase, step=step, module=module, parameter=parameter)


def parameter_of(item: Judged) -> str:
    """Return the full name of the parameter that a gradient, update or moment belongs to."""
    return parameter_name(item.port.stage.module, item.port.port)


def parameter_name(module: str, port: str) -> str:
    """Return the full name of the parameter of `module` that `port`, as "update.weight", names."""
    short = port.partition(".")[2]
    return f"{module}.{short}" if module else short


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
        "clipped_early", "packed", "not_loaded", "changed_by_skipping", "logit_gradients", "labels",
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
    measure_adamw: Callable[[str, OtherSetting | None], ReplayResults] | None = None
    """Measure updates and moments of an optimizer in a dtype, with another setting."""

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
            replace(one, replay=replace(one.replay, logit_gradients=_without_scale(one)))
            for one in self.reports
        ]
        return replace(self, candidates=self.scaled, reports=reports, scaled=[])


def _without_scale(report: TrainerReport) -> list[GradientScale]:
    """Divide the factors of the steps out of the scales of the loss gradients."""
    factors = {step.step: step.factor for step in report.replay.scaled_steps}
    return [
        replace(
            row,
            slope=(1 + row.slope) / factors[row.step] - 1,
            rest=row.rest / factors[row.step],
        )
        for row in report.replay.logit_gradients
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
