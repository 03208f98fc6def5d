"""Step, module and parameter of a measurement in a training step."""

from collections.abc import Iterable

import torch

from assay.comparing.judge import FailedStage, Judged
from assay.metrics import RowErrors
from assay.sites import Phase
from assay.training.replay.run_rows import RunRows
from assay.verdicts import Location, Measurement

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
    """Return the first step with an error over the limit, or of at least half the largest."""
    return _bad_steps(item, run_rows)[0]


def is_bad_at_first_only(item: Judged, run_rows: RunRows) -> bool:
    """Return True if no step but the first has an error over the limit, or about as large."""
    return _bad_steps(item, run_rows) == [0]


def _bad_steps(item: Judged, run_rows: RunRows) -> list[int]:
    first, _ = item.port.exact.first
    statistic = item.statistic
    if statistic == "exact" and first >= 0:
        return [run_rows.step_of(first)]
    rows = RowErrors.concatenate(item.port.sums.rows)
    # Values that belong to no prompt, such as rotary tables, have row number -1.
    starts = torch.tensor(run_rows.step_starts)
    steps = (torch.bucketize(rows.prompt.contiguous(), starts, right=True) - 1).clamp(min=0)
    errors = rows.relative()
    of_steps = torch.zeros(len(starts), dtype=errors.dtype)
    if statistic == "replay-tensor":  # of all rows of a step together
        squares, sizes = (
            of_steps.index_add(0, steps, norms.square()) for norms in (rows.error, rows.expected)
        )
        of_steps = (squares / sizes).sqrt().where(squares != 0, 0.0)
    else:
        of_steps = of_steps.scatter_reduce(0, steps, errors, "amax")
    of_steps = of_steps.nan_to_num(torch.inf, torch.inf)
    # An error of one form in all rows, such as a scale, is over its limit in no single step.
    is_general = statistic in ("replay-tensor", "replay-row")
    allowed = item.limit * item.expected if is_general else torch.inf
    bad = (of_steps > allowed) | (of_steps >= of_steps.max() / 2)
    return bad.nonzero()[:, 0].tolist() if bool(of_steps.any()) else [0]


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
