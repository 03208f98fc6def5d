"""Evidence of a training check, made by hand: three steps of a model of three modules.

The model calls `a`, `norm` and `b`, and has a parameter `weight` in each. Every value is 1, every
error is the same in all columns, and a clean run has the errors of the noise run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from assay.judge.coverage import Usage
from assay.judge.levels import DiagnosedFault
from assay.judge.limits import Limits
from assay.judge.replays import Judged, find_origin, rank_stages
from assay.judge.results import PortResult, ReplayResults
from assay.models.inspect.report import LoadReport
from assay.sites import Phase
from assay.stages import Stage
from assay.statistics import STATISTICS
from assay.trace import Trace
from assay.training.judging.diagnosis import diagnose_replay
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.judged_groups import JudgedGroup, judge_groups
from assay.training.judging.verdict import judge_training
from assay.training.replay.step_values import RunRows
from assay.training.reports import (
    FreeRun,
    LossCurve,
    ReferenceReport,
    StepRecord,
    TrainerReport,
    TrainOptions,
    TrajectoryRecord,
)
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.training.judging.candidate_reports import trainer_report

UNIT = 2.0**-8  # unit roundoff of bfloat16
STEPS, ROWS, COLUMNS, VOCABULARY = 3, 32, 4, 8
RUN_ROWS = RunRows.of_counts([[ROWS]] * STEPS)
KINDS = {"a": "Linear", "norm": "RMSNorm", "b": "Linear"}
BACKWARDS = tuple(reversed(KINDS))
VISIBLE: tuple[Phase, ...] = ("forward", "backward", "reduce", "clip", "optimizer")
LIMITS = Limits(
    "test",
    "by hand",
    dict.fromkeys(STATISTICS, 4.0)
    | {
        "replay-tensor": 3.0,
        "replay-slope": 6.0,
        "loss-error": 20.0,
        "trajectory-error": 20.0,
    },
)

# Group, module and port of a value.
Place = tuple[str, str, str]
Results = dict[str, ReplayResults]

LABELS: Place = ("stage-inputs", "", "labels")
LOGITS: Place = ("modules", "", "output.logits")
LOSS: Place = ("stage-forward", "", "loss")
LOSS_GRADIENT: Place = ("gradients", "", "output.logits")
NORM: Place = ("stage-clip", "", "norm")
UNTRAINED: Place = ("stage-optimizer", "", "changed-untrained")

# A model of one module, which ran.
USAGE = Usage(parameters={"a": ["a.weight"]}, called=["a"], read=["a.weight"])


def output(module: str) -> Place:
    return "modules", module, "output"


def boundary(module: str) -> Place:
    """The gradient that a module hands back."""
    return "gradients", module, "input.x"


def gradient(module: str, phase: Phase = "backward") -> Place:
    return f"stage-{phase}", module, "gradient.weight"


def update(module: str) -> Place:
    return "stage-optimizer", module, "update.weight"


_STAGES: dict[Place, Stage] = {
    LABELS: Stage("", "inputs"),
    ("modules", "", "input.input_ids"): Stage("", "inputs"),
    **{output(module): Stage(module) for module in KINDS},
    LOGITS: Stage(""),
    LOSS: Stage(""),
    LOSS_GRADIENT: Stage("", "backward"),
    ("gradients", "b", "output"): Stage("", "backward"),
    **{boundary(module): Stage(module, "backward") for module in BACKWARDS},
    **{gradient(module): Stage(module, "backward") for module in BACKWARDS},
    **{gradient(module, "reduce"): Stage(module, "reduce") for module in BACKWARDS},
    NORM: Stage("", "clip"),
    **{gradient(module, "clip"): Stage(module, "clip") for module in BACKWARDS},
    **{update(module): Stage(module, "optimizer") for module in KINDS},
    UNTRAINED: Stage("", "optimizer"),
}
_GROUPS = (*dict.fromkeys(group for group, _, _ in _STAGES), "recomputed")
_EXACT = (LABELS, ("modules", "", "input.input_ids"), UNTRAINED)


def rounding(size: float = UNIT / 2) -> Tensor:
    """Errors of one size and of no mean, in all steps; shape (steps, rows, 1)."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(ROWS // 2)
    return size * signs[None, :, None].expand(STEPS, ROWS, 1)


def times(factor: float) -> Tensor:
    """The error of what is this many times what it should be."""
    return torch.full((STEPS, ROWS, 1), factor - 1.0, dtype=torch.float64)


def from_step(step: int, error: Tensor) -> Tensor:
    """Rounding, and from `step` on `error`."""
    return torch.cat([rounding()[:step], error[step:]])


NOT_A_NUMBER = torch.full((STEPS, ROWS, 1), torch.nan, dtype=torch.float64)
# Beyond every limit by far: 32 units where the noise run has half a unit.
WRONG = rounding(32 * UNIT)


def measured(
    place: Place,
    error: Tensor,
    size: float = 1.0,
    dtype: str = "bfloat16",
    stage: Stage | None = None,
) -> PortResult:
    """A port where the expected value is `size` and the error `error` of it."""
    _, module, port = place
    made_by = stage or _STAGES[place]
    result = PortResult(module, port, made_by, 0, dtype, KINDS.get(made_by.module, ""))
    width = VOCABULARY if port == "output.logits" else COLUMNS
    expected = torch.full((STEPS * ROWS, width), size, dtype=torch.float64)
    rows = torch.arange(STEPS * ROWS)
    result.sums.add(expected + error.reshape(-1, 1) * size, expected, rows, rows)
    return result


def step_results(
    changed: Mapping[Place, Tensor] | None = None,
    missing: Sequence[Place] = (),
    different: Sequence[Place] = (),
    dtype: str = "bfloat16",
) -> Results:
    """What one process measured: rounding but for `changed`.

    missing: what it did not show; different: values that must be exact and are not, from step 1.
    """
    results = {name: ReplayResults() for name in _GROUPS}
    for place, stage in _STAGES.items():
        group, module, port = place
        if place in missing:
            results[group].unmatched_expected.append(f"{module or '(model)'}:{port}")
            continue
        if place in _EXACT:
            made = PortResult(module, port, stage, 0, "int64", "")
            made.exact.add(1000, int(place in different))
            if place in different:
                made.exact.first = (ROWS, -1)
        else:
            made = measured(place, (changed or {}).get(place, rounding()), dtype=dtype)
        made.order = len(results[group].ports)
        results[group].ports[module, port] = made
    return results


class HeldTrace:
    """Of a `Trace` what a judge reads, as it would come from the disk."""

    folder = Path("trace")

    def __init__(self, results: Results) -> None:
        self._parts = {name: one.to_parts() for name, one in results.items()}

    def attachment_json(self, name: str) -> Any:
        return json.loads(json.dumps(self._parts[name][0]))

    def attachment(self, name: str) -> dict[str, Tensor]:
        return self._parts[name.removesuffix("-sums")][1]


def _trace(results: Results) -> Trace:
    made: Any = HeldTrace(results)
    return cast("Trace", made)


@cache
def _clean_trace(dtype: str) -> Trace:
    return _trace(step_results(dtype=dtype))


LOSSES = [4.0, 2.0, 1.0]
# Of the three relative errors one is a unit: their root mean square is UNIT / sqrt(3).
NOISE_LOSSES = [4.0 * (1 + UNIT), 2.0, 1.0]


def records(losses: Sequence[float], first: int = 0, grad_norm: float = 1.0) -> list[StepRecord]:
    return [
        StepRecord(step=first + number, loss=loss, num_tokens=8, grad_norm=grad_norm)
        for number, loss in enumerate(losses)
    ]


def trajectory(error: float = UNIT, size: float = 1.0, **errors: float) -> list[TrajectoryRecord]:
    """The way of each module's weight, `error` off its end but for those in `errors`."""
    return [
        TrajectoryRecord(parameter=f"{module}.weight", error=errors.get(module, error), size=size)
        for module in KINDS
    ]


def free_run(**changed: Any) -> FreeRun:
    """Three steps, and the last one again from a checkpoint after two."""
    facts: dict[str, Any] = {
        "steps": records(LOSSES), "resumed": records(LOSSES[2:], 2), "trajectory": trajectory(),
        "resumed_trajectory": trajectory(), "compared": 6, "saved_compared": 3,
        "generators_compared": True,
    }  # fmt: skip
    return FreeRun(**facts | changed)


def report(free: FreeRun | None = None, **changed: Any) -> TrainerReport:
    micro_batches_run = [(step, number) for step in range(STEPS) for number in range(2)]
    facts = {"seen": list(VISIBLE), "micro_batches_run": micro_batches_run}
    return trainer_report(free or free_run(), **facts | changed)


def evidence(
    *ranks: Results,
    reports: Sequence[TrainerReport] | TrainerReport | None = None,
    noise: Results | None = None,
    options: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    measure_adamw: Callable[..., ReplayResults] | None = None,
    noise_losses: Sequence[float] = NOISE_LOSSES,
    **reference: Any,
) -> TrainEvidence:
    """What `ranks` measured, against the noise run; a clean run of one process if there is none.

    reports: of each rank, or one that all give.
    """
    if not isinstance(reports, Sequence):
        reports = [reports or report()] * max(len(ranks), 1)
    run: dict[str, Any] = {"model": "micro:llama", "steps": STEPS, "resume_at": 2}
    facts: dict[str, Any] = {
        "model": {}, "reference": {}, "yardstick": LossCurve.of(records(LOSSES)),
        "noise": LossCurve.of(records(noise_losses)),
        "noise_trajectory": trajectory(), "num_tokens": [8] * STEPS, "num_rows": [[ROWS]] * STEPS, "num_trainable": len(KINDS),
        "shared": [], "load": LoadReport(compared=1),
    }  # fmt: skip
    return TrainEvidence(
        TrainOptions(**run | dict(options or {})),
        dtype,
        ReferenceReport(usage=USAGE, **facts | reference),
        list(reports),
        LIMITS,
        noise=_trace(noise) if noise else _clean_trace(dtype),
        candidates=[_trace(one) for one in ranks] or [_clean_trace(dtype)],
        measure_adamw=measure_adamw,
    )


def ran(*ranks: FreeRun, lora: bool = False, **reference: Any) -> TrainEvidence:
    """What free runs left, each on a rank of its own."""
    reports = [report(free) for free in ranks]
    return evidence(
        *[step_results()] * len(ranks), reports=reports, options={"lora": lora}, **reference
    )


def judged(*ranks: Results, **facts: Any) -> Verdict:
    return judge_training(evidence(*ranks, **facts))[0]


def failed_levels(verdict: Verdict) -> set[str]:
    return {name for name, level in verdict.levels.items() if level.verdict is Outcome.FAIL}


def failed(groups: Mapping[str, JudgedGroup]) -> set[Place]:
    """The places with a statistic over its limit."""
    return {
        (name, item.port.module, item.port.port)
        for name, group in groups.items()
        for item in group.failed
    }


def all_judged(groups: Mapping[str, JudgedGroup]) -> list[Judged]:
    return [item for group in groups.values() for item in group.judged]


def diagnosed(made: TrainEvidence) -> DiagnosedFault:
    """What the replayed steps show; they have to show something."""
    groups = judge_groups(made)
    origin = find_origin(rank_stages(all_judged(groups)))
    assert origin is not None
    return diagnose_replay(made, groups, origin)
