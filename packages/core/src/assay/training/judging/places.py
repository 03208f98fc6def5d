"""Step, module and parameter of a measurement in a training step."""

from collections.abc import Iterable

import torch

from assay.comparing.judge import FailedStage, Judged
from assay.metrics import RowErrors
from assay.sites import Phase
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Location, Measurement

PARAMETER_PREFIX = "gradient."

# The port that stands for the updates of all parameters.
UPDATES = "update"


def is_made_by_loss(module: str, port: str) -> bool:
    """Return True for the model's result, whose gradient is computed by the loss."""
    return module == "" and port.startswith("output")


def measurement_of(level: str, item: Judged, rows: RunRows) -> Measurement:
    """Return the row of measurements.jsonl for one judged statistic."""
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


def describe_steps(steps: Iterable[int]) -> str:
    """Describe the first of `steps` and the number of later ones."""
    first, *later = sorted(set(steps))
    return f"step {first}, and {len(later)} later" if later else f"step {first}"


def first_bad_step(item: Judged, run_rows: RunRows) -> int:
    """Return the first step with an error of at least half the largest."""
    return _bad_steps(item, run_rows)[0]


def is_bad_at_first_only(item: Judged, run_rows: RunRows) -> bool:
    """Return True if only the first step has an error of at least half the largest."""
    return _bad_steps(item, run_rows) == (0, 0)


def _bad_steps(item: Judged, run_rows: RunRows) -> tuple[int, int]:
    """Return the first and last step with an error of at least half the largest."""
    first, _ = item.port.exact.first
    if item.ratio.statistic == "exact" and first >= 0:
        step = run_rows.step_of(first)
        return step, step
    rows = RowErrors.concatenate(item.port.sums.rows)
    if rows.error.numel() == 0:
        return 0, 0
    relative = torch.where(rows.error.isnan(), torch.inf, rows.relative())
    bad = rows.prompt[relative >= float(relative.max()) / 2]
    # Values that belong to no prompt, such as rotary tables, have row number -1.
    return max(0, run_rows.step_of(int(bad[0]))), max(0, run_rows.step_of(int(bad.max())))


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
