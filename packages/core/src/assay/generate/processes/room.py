"""Decides, before anything large is loaded, how a check fits on this machine and into its budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.devices.base import Device
from assay.errors import MachineError, UsageError
from assay.generate.passes.whole_texts import steps_of_texts
from assay.generate.processes.durations import Durations, Speed
from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.needs import (
    Needs,
    TrialCall,
    Widening,
    allowed_memory,
    choose_widening,
    estimate_needs,
    require_disk,
)
from assay.generate.processes.requests import GoldenRequest, InputOptions
from assay.models.loading.configs import first_line
from assay.models.loading.loaded_model import load_outline
from assay.progress import format_duration
from assay.runs import Progress

# Fewer new tokens would leave no decode step.
_FEWEST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Room:
    """How a check fits on this machine, and the expected seconds of its phases."""

    inputs: InputOptions
    """Those of the request, with fewer new tokens where the budget is short."""
    widening: Widening = "at once"
    seconds: Sequence[float] = ()
    of_candidate: Sequence[float] = ()
    """The seconds of a candidate on the same device."""


def require_room(
    request: GoldenRequest, device: Device, yardstick_dtype: str, progress: Progress
) -> Room:
    """Estimate time, memory and disk before anything large is loaded.

    Raises: MachineError if memory, disk or the budget are too small.
    """
    try:
        estimates = _Estimates(request, device, yardstick_dtype)
    except UsageError:
        raise
    except Exception as error:
        problem = f"time, memory and disk cannot be estimated for this model: {first_line(error)}"
        limits = {
            "--disk": request.max_disk,
            "--memory": request.max_memory,
            "--budget": request.max_seconds,
        }
        for name, limit in limits.items():
            if limit is not None:
                raise MachineError(f"{name}: {problem}") from error
        progress.note(problem)
        return Room(request.inputs)
    inputs = estimates.inputs_within(request.max_seconds)
    needs = estimates.needs(inputs)
    require_disk(needs, Path(request.folder), request.max_disk)
    widening = choose_widening(needs, allowed_memory(device, request.max_memory))
    progress.note(f"the reference needs {needs.describe(widening)}")
    if request.level != "module":
        return Room(inputs, widening)
    seconds, of_candidate = estimates.seconds(inputs)
    progress.note(
        f"the reference takes about {format_duration(sum(seconds))}, and a candidate on"
        f" {request.reference.device} {format_duration(sum(of_candidate))}"
    )
    return Room(inputs, widening, seconds, of_candidate)


class _Estimates:
    """Estimates for one request and any inputs."""

    def __init__(self, request: GoldenRequest, device: Device, yardstick_dtype: str) -> None:
        self._request, self._yardstick_dtype = request, yardstick_dtype
        self._outline = load_outline(request.model, request.remote_code)
        self._trial = TrialCall.of(self._outline.model)
        self._wide, *self._narrow = (
            Speed.probe(device, dtype) for dtype in (yardstick_dtype, *request.noise_for)
        )

    def needs(self, inputs: InputOptions) -> Needs:
        """Estimate memory and disk."""
        plan = plan_inputs(inputs, self._outline)
        num_values = self._trial.num_values
        return estimate_needs(self._request, self._outline, plan, self._yardstick_dtype, num_values)

    def seconds(self, inputs: InputOptions) -> tuple[list[float], list[float]]:
        """Estimate the seconds of each phase of the reference and of a candidate."""
        plan = plan_inputs(inputs, self._outline)
        durations = Durations(
            self._trial.seconds,
            sum(one.numel() for one in self._outline.model.parameters()),
            self._trial.num_values,
            self.needs(inputs).disk,
            plan.batches,
            reads_texts=bool(steps_of_texts(self._outline, plan.batches)),
        )
        of_reference = [
            one for speed in self._narrow for one in durations.of_reference(self._wide, speed)
        ]
        return of_reference, durations.of_candidate(self._narrow[0])

    def inputs_within(self, max_seconds: float | None) -> InputOptions:
        """Halve the number of new tokens until both sides fit into the budget.

        All prompts and the first steps are kept. Raises: MachineError if those take too long.
        """
        inputs = self._request.inputs
        if max_seconds is None:
            return inputs
        while (took := sum(map(sum, self.seconds(inputs)))) > max_seconds:
            fewer = inputs.max_new_tokens // 2
            if fewer < _FEWEST_TOKENS or not self._outline.can_generate:
                raise MachineError(
                    f"the check takes about {format_duration(took)}, and --budget allows"
                    f" {format_duration(max_seconds)}: take shorter --prompts, or --level logits"
                )
            inputs = inputs.model_copy(update={"max_new_tokens": fewer})
        return inputs
