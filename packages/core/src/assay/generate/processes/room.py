"""Decides, before anything large is loaded, how the reference fits on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.devices.base import Device
from assay.errors import MachineError, UsageError
from assay.generate.passes.whole_texts import steps_of_texts
from assay.generate.processes.durations import Durations, Speed
from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.needs import (
    TrialCall,
    Widening,
    allowed_memory,
    choose_widening,
    estimate_needs,
    require_disk,
)
from assay.generate.processes.requests import GoldenRequest
from assay.models.loading.configs import first_line
from assay.models.loading.loaded_model import load_outline
from assay.progress import format_duration
from assay.runs import Progress


@dataclass(frozen=True, slots=True)
class Room:
    """How the reference fits on this machine, and the expected seconds of its phases."""

    widening: Widening = "at once"
    seconds: Sequence[float] = ()
    of_candidate: Sequence[float] = ()
    """The seconds of a candidate on the same device."""


def require_room(
    request: GoldenRequest, device: Device, yardstick_dtype: str, progress: Progress
) -> Room:
    """Estimate time, memory and disk before anything large is loaded.

    Raises: MachineError if memory or disk are too small.
    """
    try:
        outline = load_outline(request.model, request.remote_code)
        plan = plan_inputs(request.inputs, outline)
        reads_texts = bool(steps_of_texts(outline, plan.batches))
        trial = TrialCall.of(outline.model)
        needs = estimate_needs(request, outline, plan, yardstick_dtype, trial.num_values)
        wide, *narrow = (
            Speed.probe(device, dtype) for dtype in (yardstick_dtype, *request.noise_for)
        )
    except UsageError:
        raise
    except Exception as error:
        problem = f"time, memory and disk cannot be estimated for this model: {first_line(error)}"
        for name, limit in (("--disk", request.max_disk), ("--memory", request.max_memory)):
            if limit is not None:
                raise MachineError(f"{name}: {problem}") from error
        progress.note(problem)
        return Room()
    require_disk(needs, Path(request.folder), request.max_disk)
    widening = choose_widening(needs, allowed_memory(device, request.max_memory))
    progress.note(f"the reference needs {needs.describe(widening)}")
    if request.level != "module":
        return Room(widening)
    num_weights = sum(one.numel() for one in outline.model.parameters())
    durations = Durations(
        trial.seconds, num_weights, trial.num_values, needs.disk, plan.batches, reads_texts
    )
    seconds = [one for speed in narrow for one in durations.of_reference(wide, speed)]
    of_candidate = durations.of_candidate(narrow[0])
    progress.note(
        f"the reference takes about {format_duration(sum(seconds))}, and a candidate on"
        f" {request.reference.device} {format_duration(sum(of_candidate))}"
    )
    return Room(widening, seconds, of_candidate)
