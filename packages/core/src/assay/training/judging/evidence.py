"""What there is to judge of a training check, and the words for places in it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from assay.comparing.judge import Allowances, DeviceBias, FailedStage, Judged, judge_replay
from assay.comparing.limits import Limits
from assay.comparing.results import PortResult, ReplayResults
from assay.dtypes import float_format
from assay.metrics import PairSums, RowErrors
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace
from assay.training.judging.rank_reports import merge_reports
from assay.training.processes.requests import CandidateReport, ReferenceReport, TrainOptions
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Level, Location, Measurement

# Measurements in the order of a step: what is first of several equally bad is the place.
GROUPS = (
    "stage-inputs", "modules", "stage-forward", "recomputed", "gradients", "stage-backward",
    "stage-reduce", "stage-clip", "stage-optimizer",
)  # fmt: skip
_BACKWARD_GROUPS = ("gradients", "stage-backward")

PARAMETER_PREFIX = "gradient."


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
        """What all ranks say together."""
        return merge_reports(self.reports)

    @cached_property
    def rows(self) -> RunRows:
        """Which rows of the run belong to which step."""
        return RunRows.of_counts(self.reference.num_rows)

    @property
    def unit_roundoff(self) -> float:
        """That of the candidate's dtype."""
        return float_format(self.dtype).unit_roundoff


@dataclass(slots=True)
class Group:
    """The measurements of one kind, judged.

    ports: what every rank measured.
    broken: ports where the noise run itself is not finite, so that nothing can be said.
    unmatched_expected, unmatched_actual: what the reference has and some rank did not show, and the
        other way round.
    """

    name: str
    ports: list[PortResult] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    unmatched_expected: list[str] = field(default_factory=list)
    unmatched_actual: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Judged]:
        """What is over its limit."""
        return [item for item in self.judged if item.failed]


@dataclass(slots=True)
class LevelResult:
    """What one level found."""

    level: Level
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge_groups(evidence: TrainEvidence) -> dict[str, Group]:
    """All measurements of the replayed steps, judged."""
    groups: dict[str, Group] = {}
    nowhere = set.intersection(*(set(report.absent) for report in evidence.reports))
    ties: set[str] = set()
    replaced_by_ancestor: dict[int, list[str]] = {}
    partial_modules = [report.partial_modules for report in evidence.reports]
    measured = {name: _read(evidence.noise, name) for name in GROUPS}
    # The noise run computes nothing twice: what is computed again rounds as the first time.
    measured["recomputed"] = measured["modules"]
    least_units = {Stage("", "backward"): _unit_of_loss(measured)}
    beside = _noise_of_late_phases(measured, evidence.report.invisible)
    num_before = 0  # ports of the groups before, on the rank that has most of each
    for name, noise in measured.items():
        broken = {
            key for key, port in noise.ports.items() if port.sums.num_nan or port.sums.num_inf
        }
        group = groups[name] = Group(name)
        if name != "recomputed":  # forward tells of it
            group.broken = [f"{module or '(model)'}:{port}" for module, port in sorted(broken)]
        of_ranks = [_read(trace, name) for trace in evidence.candidates]
        for rank, results in enumerate(of_ranks):
            if name == "modules":
                replaced_by_ancestor[rank] = results.replaced_by_ancestor
            elif name in ("recomputed", "gradients"):
                # Who does a module's work forwards does it again, and backwards.
                results.replaced_by_ancestor = replaced_by_ancestor[rank]
            for port in results.ports.values():
                port.order += num_before
                port.rank = rank
                if port.exact.num_near_ties:
                    ties.add(port.stage.module)
            shown = any(_is_made_by_loss(*key) for key in results.ports)
            own_noise = (
                noise if shown and not partial_modules[rank] else _noise_at_head(results, noise)
            )
            others = beside.get(name, {})
            if name == "stage-backward":
                others = _noise_of_unmet_results(measured["gradients"], replaced_by_ancestor[rank])
            allowances = Allowances(least_units, others)
            judged, bias = judge_replay(results, own_noise, evidence.limits, allowances)
            _add_rank(group, results, judged, bias, broken)
        num_before += max(len(results.ports) for results in of_ranks)
        if name in _BACKWARD_GROUPS:
            _leave_out(group, ties)
    groups["stage-optimizer"].unmatched_expected += [
        f"{name}: on no rank" for name in sorted(nowhere)
    ]
    return groups


def _noise_at_head(results: ReplayResults, noise: ReplayResults) -> ReplayResults:
    """The noise run's results where what the loss hands to the model arrives at the head.

    So it is in a stage of a pipeline, where the model itself is not measured, and for a model that
    computes its loss itself.
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


def _port_of_loss(noise: ReplayResults) -> PortResult | None:
    """What the noise run measured of the gradient that its loss gave."""
    found = (port for key, port in noise.ports.items() if _is_made_by_loss(*key))
    return next(found, None)


def _width(port: PortResult) -> int | None:
    return None if port.sums.channel is None else port.sums.channel.shape[1]


def _is_made_by_loss(module: str, port: str) -> bool:
    return module == "" and port.startswith("output")


def _unit_of_loss(noise: Mapping[str, ReplayResults]) -> float:
    """What rounding the largest logits to float32 changes of the gradient that a loss gives.

    A loss that takes the logarithm of a sum from each logit at once, as fused ones do, has
    probabilities of this relative error; taking off the largest logit first is many times better.
    """
    loss = _port_of_loss(noise["gradients"])
    sizes = [
        math.sqrt(float(port.sums.channel[2].max()) / port.sums.channel_rows)
        for (_, name), port in noise["modules"].ports.items()
        if loss is not None
        and port.sums.channel is not None
        and name.startswith("output")
        and _width(port) == _width(loss)
    ]
    return float_format("float32").unit_roundoff * max(sizes, default=1.0)


def _noise_of_unmet_results(
    gradients: ReplayResults, replaced_by_ancestor: Sequence[str]
) -> dict[str, list[PairSums]]:
    """What the noise run measured of gradients at the results of modules that are never called.

    They are not fed either: gradients of the modules' parameters are made from what comes.
    """
    found: dict[str, list[PairSums]] = {}
    for (module, name), port in gradients.ports.items():
        if module in replaced_by_ancestor and name.startswith("output"):
            found.setdefault(module, []).append(port.sums)
    return found


def _noise_of_late_phases(
    noise: Mapping[str, ReplayResults], invisible: Mapping[str, str]
) -> dict[str, dict[str, list[PairSums]]]:
    """By group, and by module, what the noise run measured of phases that are seen only there."""
    found: dict[str, dict[str, list[PairSums]]] = {}
    waiting: dict[str, list[PairSums]] = {}
    for phase in ("backward", "reduce", "clip", "optimizer"):
        if phase not in invisible:
            found[f"stage-{phase}"], waiting = waiting, {}
        elif phase != "reduce":
            for port in noise[f"stage-{phase}"].ports.values():
                if port.port.startswith(PARAMETER_PREFIX):
                    waiting.setdefault(port.stage.module, []).append(port.sums)
    return found


def _add_rank(
    group: Group,
    results: ReplayResults,
    judged: list[Judged],
    bias: DeviceBias | None,
    broken: set[tuple[str, str]],
) -> None:
    """Add what one rank measured to its group."""
    group.judged += [item for item in judged if (item.port.module, item.port.port) not in broken]
    group.ports += results.ports.values()
    group.unmatched_expected += results.unmatched_expected
    group.unmatched_actual += results.unmatched_actual
    if bias is not None:
        group.notes.append(
            f"all {bias.num_modules} matrix products shrink their results by about"
            f" {-bias.slope:.1e}: the device truncates sums. This is not counted as an error;"
            " an equal error in all of them would not be seen"
        )


def _leave_out(group: Group, ties: set[str]) -> None:
    """Drop the gradients of routers that chose otherwise where scores are nearly equal.

    Backward goes through what their own code chose, which no boundary can put right.
    """
    left = [item for item in group.judged if item.port.stage.module in ties]
    if left:
        modules = sorted({item.port.stage.module for item in left})
        group.notes.append(
            f"gradients of {', '.join(modules)} are not judged: routing choices differ there where"
            " the scores are nearly equal"
        )
        group.judged = [item for item in group.judged if item.port.stage.module not in ties]


def _read(trace: Trace, name: str) -> ReplayResults:
    data: Any = trace.attachment_json(name)
    return ReplayResults.from_parts(data, trace.attachment(f"{name}-sums"))


def measurement_of(level: str, item: Judged, rows: RunRows) -> Measurement:
    """The row of measurements.jsonl for one judged statistic."""
    port = item.port
    own = port.module == port.stage.module
    return Measurement(
        level=level,
        module=port.stage.module,
        port=port.port if own else f"{port.module}:{port.port}",
        phase=port.stage.phase,
        rank=port.rank,
        step=first_bad_step(item, rows) if item.failed else 0,
        order=port.order,
        statistic=item.ratio.statistic,
        actual=item.ratio.actual,
        expected=item.ratio.expected,
        ratio=item.ratio.value,
        limit=item.limit,
    )


def first_bad_step(item: Judged, run_rows: RunRows) -> int:
    """The first step in which the error is about as large as it gets."""
    first, _ = item.port.exact.first
    if item.ratio.statistic == "exact" and first >= 0:
        return run_rows.step_of(first)
    rows = RowErrors.concatenate(item.port.sums.rows)
    if rows.error.numel() == 0:
        return 0
    relative = torch.where(rows.error.isnan(), torch.inf, rows.relative())
    half = float(relative.max()) / 2
    # Rows of what no prompt owns, as rotary tables, have no number.
    return max(0, run_rows.step_of(int(rows.prompt[(relative >= half).nonzero()[0, 0]])))


def location_of(failed: FailedStage, judged: list[Judged], rows: RunRows) -> Location:
    """Phase, module and parameter of a stage; `judged` holds all its failed statistics."""
    own = [item for item in judged if item.failed and item.port.stage == failed.stage]
    gradients = [item for item in own if item.port.port.startswith(PARAMETER_PREFIX)]
    reported = failed.reported.port
    parameter = None
    if failed.stage.phase == "optimizer":
        parameter = parameter_of(failed.reported) or None
    elif gradients:
        parameter = parameter_of(max(gradients, key=lambda item: item.severity))
    made_by_loss = reported.module == "" and (
        reported.port.startswith("output") or reported.port == "loss"
    )
    return Location(
        phase=failed.stage.phase,
        step=first_bad_step(failed.reported, rows),
        rank=reported.rank,
        module=failed.stage.module,
        op="loss" if made_by_loss and failed.stage.phase in ("forward", "backward") else None,
        parameter=parameter,
    )


def parameter_of(item: Judged) -> str:
    """The full name of the parameter to which a port of gradients, updates or moments belongs."""
    module, short = item.port.stage.module, item.port.port.partition(".")[2]
    return f"{module}.{short}" if module else short


def is_root_gradient(module: str, port: str, phase: Phase) -> bool:
    """Whether the gradient at a port was made by the loss."""
    return phase == "backward" and _is_made_by_loss(module, port)
