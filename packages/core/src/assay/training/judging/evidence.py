"""The evidence of both sides of a training check, merged over ranks, and its measurements, judged in groups."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from assay.judge.levels import describe_uncalled
from assay.judge.limits import Limits
from assay.judge.replays import Allowances, FailedStage, Judged, judge_replay
from assay.judge.results import PortResult, ReplayResults, read_results
from assay.kernel import POOLED
from assay.metrics import PairSums, RowErrors
from assay.noise import SLOPE_FLOOR, slope_ratio
from assay.replay.gradients import GradientScale
from assay.sites import Phase
from assay.stages import Stage
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


# In the order of a step: of several equally bad measurements, the first names the place. `gradients`
# are at module boundaries, `stage-backward` at parameters; the level `gradients` has both.
GROUPS = (
    "stage-inputs", "modules", "stage-forward", "recomputed", "gradients", "stage-backward",
    "stage-reduce", "stage-clip", "stage-optimizer",
)  # fmt: skip

# Powers of ten of a setting that are tried until one shows.
_MOST_POWERS = 7

# The mantissa of every power of two, according to math.frexp.
_HALF = 0.5


@dataclass(slots=True)
class JudgedGroup:
    """The judged measurements of one kind, of all ranks."""

    name: str
    ports: list[PortResult] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Ports that cannot be judged because the noise run is not finite there."""
    unmatched_expected: list[str] = field(default_factory=list)
    unmatched_actual: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """Phase of the values, or the group's name if they belong to several phases."""
        return self.name.removeprefix("stage-")

    @property
    def failed(self) -> list[Judged]:
        """Statistics over their limits."""
        return [item for item in self.judged if item.failed]


def judge_groups(evidence: TrainEvidence) -> dict[str, JudgedGroup]:
    """Judge every measurement of the replayed steps, and return the groups in the order of `GROUPS`."""
    noise, of_ranks = _read_noise(evidence), _read_ranks(evidence)
    groups = {name: _judge_group(name, evidence, noise, of_ranks) for name in GROUPS}
    _drop_router_gradients(groups)
    never_called = {one for results in of_ranks["modules"] for one in results.uncalled_modules}
    if never_called:
        groups["modules"].notes.append(describe_uncalled(sorted(never_called)))
    on_no_rank = set.intersection(*(set(report.model.absent) for report in evidence.reports))
    updates = groups["stage-optimizer"]
    updates.unmatched_expected += [f"{name}: on no rank" for name in sorted(on_no_rank)]
    return groups


def _judge_group(
    name: str,
    evidence: TrainEvidence,
    noise: Mapping[str, ReplayResults],
    of_ranks: Mapping[str, Sequence[ReplayResults]],
) -> JudgedGroup:
    """Judge the values of one group on every rank, but where the noise run is not finite."""
    group, ports = JudgedGroup(name), noise[name].ports
    not_finite = {key for key, one in ports.items() if one.sums.num_nan or one.sums.num_inf}
    if name != "recomputed":  # the group of the forward pass names them
        group.broken = [f"{module or '(model)'}:{port}" for module, port in sorted(not_finite)]
    for rank, results in enumerate(of_ranks[name]):
        of_rank = {one: of_ranks[one][rank] for one in GROUPS}
        own_noise = noise[name]
        if evidence.reports[rank].traits.partial_modules or _computes_loss_in_model(of_rank):
            own_noise = _noise_at_head(results, own_noise)
        allowances = _allowances(evidence, noise, name, of_rank)
        judged, bias = judge_replay(results, own_noise, evidence.limits, allowances)
        group.judged += [
            item for item in judged if (item.port.module, item.port.port) not in not_finite
        ]
        if name == "stage-optimizer":
            wrong = {id(item.port) for item in group.failed}
            passed = [key for key, port in results.ports.items() if id(port) not in wrong]
            group.judged += _judge_common_scale(passed, results, own_noise, evidence)
        group.ports += results.ports.values()
        group.unmatched_expected += results.unmatched_expected
        group.unmatched_actual += results.unmatched_actual
        group.notes += [bias.note] if bias is not None else []
    return group


def _read_noise(evidence: TrainEvidence) -> dict[str, ReplayResults]:
    """Read the noise run's results by group."""
    noise = {name: read_results(evidence.noise, name) for name in GROUPS}
    noise["stage-optimizer"] = _noise_of_optimizer(evidence, noise["stage-optimizer"])
    # The noise run recomputes nothing. A recomputed value rounds like the first one.
    noise["recomputed"] = noise["modules"]
    return noise


def _allowances(
    evidence: TrainEvidence,
    noise: Mapping[str, ReplayResults],
    name: str,
    of_rank: Mapping[str, ReplayResults],
) -> Allowances:
    """Return what a rank's values in group `name` may differ by beyond the noise of their own places."""
    traits, results = evidence.report.traits, of_rank[name]
    uncalled_modules = of_rank["modules"].uncalled_modules
    units = dict.fromkeys(_stages_of_loss(noise, uncalled_modules), _unit_of_loss(noise))
    units |= _units_of_unscaling(evidence, name, results)
    if name == "stage-forward" and _computes_loss_in_model(of_rank):
        units[Stage("", "forward")] = _unit_of_loss_in_model(evidence, noise)
    if name == "stage-optimizer" and traits.update_rounding:
        units |= {port.stage: traits.update_rounding for port in results.ports.values()}
    if name == "stage-backward":
        other_work = _noise_at_results_of_replaced_modules(noise["gradients"], uncalled_modules)
    else:
        other_work = _noise_of_late_phases(noise, traits.invisible_phases).get(name, {})
    return Allowances(units, other_work)


def list_unseen_settings(evidence: TrainEvidence) -> Iterator[str]:
    """Describe each stated setting of AdamW that an optimizer can ignore and pass, and what shows it."""
    if (measure := evidence.measure_adamw) is None:
        return
    own = "float32" if evidence.report.free.kept is not None else evidence.dtype
    noise = _noise_of_optimizer(evidence, read_results(evidence.noise, "stage-optimizer"))

    def shows(arithmetic: str, noise: ReplayResults, other: OtherSetting) -> bool:
        results = measure(arithmetic, other)
        judged, _ = judge_replay(results, noise, evidence.limits)
        judged += _judge_common_scale([*results.ports], results, noise, evidence)
        return any(item.failed for item in judged)

    for parameters, settings in evidence.options.parameter_groups.items():
        for name, value in settings.items():
            other = OtherSetting.instead(parameters, name, value)
            if other is None or shows(own, noise, other):
                continue
            advice = "no larger value was found that shows"
            stated = replace(other, value=value)
            if own != "float32" and shows("float32", measure("float32", stated), other):
                advice = "float32 or --mixed-precision shows it"
            else:
                largest = max(value, other.value)
                tried = (largest * 10.0**power for power in range(1, _MOST_POWERS))
                found = (one for one in tried if shows(own, noise, replace(other, value=one)))
                if (seen := next(found, None)) is not None:
                    advice = f"a value of about {seen:g} would show"
            yield (
                f"{name} {value:g} of {parameters!r} was not checked: in {own}, an optimizer with {other.value:g}"
                f" passes too; {advice}"
            )


def _judge_common_scale(
    passed: Sequence[tuple[str, str]],
    results: ReplayResults,
    noise: ReplayResults,
    evidence: TrainEvidence,
) -> list[Judged]:
    """Judge the scale of the updates of all parameters together, without those that fail alone.

    In 16 bits, rounding changes an update by a fifth, so that the scale of one parameter's updates is
    known to a tenth. Over all of them it averages out to a thousandth.
    """
    pairs = [
        (results.ports[key], noise.ports[key].sums)
        for key in passed
        if key[1].startswith(UPDATE_PREFIX) and key in noise.ports
    ]
    if not pairs:
        return []
    actual, expected = (_total(sums) for sums in zip(*((p.sums, n) for p, n in pairs), strict=True))
    if not math.isfinite(actual.slope + expected.slope):
        return []
    unit = max(float_format(port.dtype).unit_roundoff for port, _ in pairs)
    unit = max(unit, evidence.report.traits.update_rounding / SLOPE_FLOOR)
    ratio = slope_ratio(actual, expected, unit)
    order = min(port.order for port, _ in pairs)
    everywhere = PortResult("", UPDATES, Stage("", "optimizer"), order, pairs[0][0].dtype, "")
    everywhere.sums, everywhere.rank = actual, pairs[0][0].rank
    return [Judged.of(ratio, evidence.limits.of(ratio.statistic), everywhere)]


def _total(parts: Sequence[PairSums]) -> PairSums:
    names = ("num_elements", *POOLED)
    total = PairSums(**{name: sum(getattr(one, name) for one in parts) for name in names})
    total.rows = [rows for one in parts for rows in one.rows]
    return total


def _noise_of_optimizer(evidence: TrainEvidence, in_dtype: ReplayResults) -> ReplayResults:
    """Return the noise for updates and moments: the noise run's, or that of an optimizer in float32.

    in_dtype: measurements of the noise run in the candidate's dtype. They apply to the updates of
        parameters that are rounded to that dtype from a wider copy.
    """
    kept = evidence.report.free.kept
    if kept is None:
        return in_dtype
    if evidence.measure_adamw is None:
        raise ValueError("mixed precision is judged by an optimizer in float32")
    in_float32 = evidence.measure_adamw("float32", None)
    copied = set(kept.copied)
    from_copies = {
        key: port
        for key, port in in_dtype.ports.items()
        if port.port.startswith(UPDATE_PREFIX) and parameter_name(*key) in copied
    }
    return replace(in_float32, ports=in_float32.ports | from_copies)


def _read_ranks(evidence: TrainEvidence) -> dict[str, list[ReplayResults]]:
    """Read the results of each rank by group, and number the ports over all groups."""
    of_groups: dict[str, list[ReplayResults]] = {}
    num_before = 0  # ports of earlier groups, each on the rank with most of them
    for name in GROUPS:
        of_ranks = of_groups[name] = [read_results(trace, name) for trace in evidence.candidates]
        for rank, results in enumerate(of_ranks):
            if name in ("recomputed", "gradients"):
                # A module that forward never calls is missing in recomputation and backward too.
                results.uncalled_modules = of_groups["modules"][rank].uncalled_modules
            for port in results.ports.values():
                port.order += num_before
                port.rank = rank
        num_before += max(len(results.ports) for results in of_ranks)
    return of_groups


def _noise_at_head(results: ReplayResults, noise: ReplayResults) -> ReplayResults:
    """Return the noise run's results for a rank on which the gradient of the loss arrives at the head.

    This holds for a pipeline stage, where the model itself is not measured, and for a model that
    computes its own loss.
    """
    loss = _port_of_loss(noise)
    if loss is None:
        return noise
    root = Stage("", "backward")
    arrived = {
        key: loss
        for key, port in results.ports.items()
        if port.stage == root and _width(port) == _width(loss)
    }
    return replace(noise, ports=noise.ports | arrived)


def _computes_loss_in_model(of_rank: Mapping[str, ReplayResults]) -> bool:
    """Return True if no gradient of a loss arrives at the model's results."""
    return _port_of_loss(of_rank["gradients"]) is None


def _unit_of_loss_in_model(evidence: TrainEvidence, noise: Mapping[str, ReplayResults]) -> float:
    """Return twice the relative error of a loss whose logits the model rounds after its head, as a soft cap does.

    The noise run computes its loss from injected logits. With an error s of each logit, the loss of a token
    changes by up to sqrt(2) s, and the errors of N tokens of a step are independent.
    """
    of_logits = [
        port.sums
        for module, port in _ports_of_logits(noise)
        if not module and not port.stage.module
    ]
    loss = noise["stage-forward"].ports.get(("", "loss"))
    if not of_logits or loss is None or not loss.sums.ee:
        return 0.0
    error = max(math.sqrt(one.dd / one.num_elements) for one in of_logits)
    num_tokens = min(evidence.reference.num_tokens)
    num_micro_batches = loss.sums.num_elements / len(evidence.reference.num_tokens)
    size = math.sqrt(loss.sums.ee / loss.sums.num_elements)  # of one micro-batch's share
    return 2 * error * math.sqrt(2 / (num_tokens * num_micro_batches)) / size


def _port_of_loss(noise: ReplayResults) -> PortResult | None:
    """Find the noise run's measurement of the gradient of its loss."""
    found = (port for key, port in noise.ports.items() if is_made_by_loss(*key))
    return next(found, None)


def _width(port: PortResult) -> int | None:
    return None if port.sums.channel is None else port.sums.channel.shape[1]


def _ports_of_logits(noise: Mapping[str, ReplayResults]) -> list[tuple[str, PortResult]]:
    """Return the results of modules, each with its path, that are as wide as the gradient of the loss."""
    loss = _port_of_loss(noise["gradients"])
    return [
        (module, port)
        for (module, name), port in noise["modules"].ports.items()
        if loss is not None and name.startswith("output") and _width(port) == _width(loss)
    ]


def _unit_of_loss(noise: Mapping[str, ReplayResults]) -> float:
    """Return the relative error of a loss gradient from rounding the largest logits to float32.

    A fused loss subtracts the logarithm of the sum from each logit in one operation, and its
    probabilities have this error. Subtracting the largest logit first is many times more accurate.
    """
    sizes = [
        math.sqrt(float(port.sums.channel[2].max()) / port.sums.channel_rows)
        for _, port in _ports_of_logits(noise)
        if port.sums.channel is not None
    ]
    return float_format("float32").unit_roundoff * max(sizes, default=1.0)


def _stages_of_loss(
    noise: Mapping[str, ReplayResults], uncalled_modules: Sequence[str]
) -> list[Stage]:
    """List the stages whose backward uses the gradient of the loss outside of any called module.

    These are the model's own code, and a head that is fused with the loss.
    """
    heads = {module for module, _ in _ports_of_logits(noise) if module in uncalled_modules}
    return [Stage(module, "backward") for module in ("", *sorted(heads))]


def _units_of_unscaling(
    evidence: TrainEvidence, name: str, results: ReplayResults
) -> dict[Stage, float]:
    """Return the rounding of removing the loss scale, for each stage of the phase that removes it.

    A power of two rounds nothing. Other factors round once when applied, and once when removed.
    """
    factors = [
        step.factor
        for step in evidence.report.replay.scaled_steps
        if name == f"stage-{step.taken_off or 'optimizer'}"
    ]
    if all(abs(math.frexp(factor)[0]) == _HALF for factor in factors):
        return {}
    return {port.stage: 2 * evidence.unit_roundoff for port in results.ports.values()}


def _noise_at_results_of_replaced_modules(
    gradients: ReplayResults, uncalled_modules: Sequence[str]
) -> dict[str, list[PairSums]]:
    """Return the noise run's measurements of gradients at the results of modules never called.

    No gradient is injected there, so the gradients of their parameters carry that error too.
    """
    found: dict[str, list[PairSums]] = {}
    for (module, name), port in gradients.ports.items():
        if module in uncalled_modules and name.startswith("output"):
            found.setdefault(module, []).append(port.sums)
    return found


def _noise_of_late_phases(
    noise: Mapping[str, ReplayResults], invisible: Mapping[Phase, str]
) -> dict[str, dict[str, list[PairSums]]]:
    """Return the noise run's measurements of invisible phases, by the next visible group and module."""
    found: dict[str, dict[str, list[PairSums]]] = {}
    waiting: dict[str, list[PairSums]] = {}
    phases: tuple[Phase, ...] = ("backward", "reduce", "clip", "optimizer")
    for phase in phases:
        if phase not in invisible:
            found[f"stage-{phase}"], waiting = waiting, {}
        elif phase != "reduce":
            for port in noise[f"stage-{phase}"].ports.values():
                if port.port.startswith(PARAMETER_PREFIX):
                    waiting.setdefault(port.stage.module, []).append(port.sums)
    return found


def _drop_router_gradients(groups: Mapping[str, JudgedGroup]) -> None:
    """Drop the gradients of routers that chose differently between nearly equal scores.

    Backward follows the choice of their own code, which no injected value corrects.
    """
    ports = [port for group in groups.values() for port in group.ports]
    near_tie_modules = {port.stage.module for port in ports if port.exact.num_near_ties}
    for group in (groups[name] for name in ("gradients", "stage-backward")):
        left = [item for item in group.judged if item.port.stage.module in near_tie_modules]
        if left:
            modules = sorted({item.port.stage.module for item in left})
            group.notes.append(
                f"gradients of {', '.join(modules)} are not judged: routing choices differ there"
                " where the scores are nearly equal"
            )
            group.judged = [
                item for item in group.judged if item.port.stage.module not in near_tie_modules
            ]
