"""Where in a training step something was measured: step, module and parameter of a port."""

from collections.abc import Iterable

import torch

from assay.comparing.judge import FailedStage, Judged
from assay.metrics import RowErrors
from assay.sites import Phase
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Location, Measurement

PARAMETER_PREFIX = "gradient."


def is_made_by_loss(module: str, port: str) -> bool:
    """Whether what is at a port comes from the loss: the result of the model, and its gradient."""
    return module == "" and port.startswith("output")


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


def describe_steps(steps: Iterable[int]) -> str:
    """Describe the first of `steps` and the number of later ones."""
    first, *later = sorted(set(steps))
    return f"step {first}, and {len(later)} later" if later else f"step {first}"


def first_bad_step(item: Judged, run_rows: RunRows) -> int:
    """The first step in which the error is about as large as it gets."""
    return _bad_steps(item, run_rows)[0]


def is_bad_at_first_only(item: Judged, run_rows: RunRows) -> bool:
    """Whether the error is about as large as it gets in the first step, and in no later one."""
    return _bad_steps(item, run_rows) == (0, 0)


def _bad_steps(item: Judged, run_rows: RunRows) -> tuple[int, int]:
    """The first and the last step in which the error is about as large as it gets."""
    first, _ = item.port.exact.first
    if item.ratio.statistic == "exact" and first >= 0:
        step = run_rows.step_of(first)
        return step, step
    rows = RowErrors.concatenate(item.port.sums.rows)
    if rows.error.numel() == 0:
        return 0, 0
    relative = torch.where(rows.error.isnan(), torch.inf, rows.relative())
    bad = rows.prompt[relative >= float(relative.max()) / 2]
    # Rows of what no prompt owns, as rotary tables, have no number.
    return max(0, run_rows.step_of(int(bad[0]))), max(0, run_rows.step_of(int(bad.max())))


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
    return phase == "backward" and is_made_by_loss(module, port)
