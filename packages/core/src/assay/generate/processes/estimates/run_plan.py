"""Plan a run that fits on this machine and into its budget, before weights are loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.devices.base import Device
from assay.devices.trusted import trusted_device
from assay.errors import AssayError, MachineError
from assay.estimates.limits import allowed_memory, report_unknown, require_disk
from assay.estimates.speed import Speed
from assay.estimates.trial_call import TrialCall
from assay.generate.passes.whole_texts import steps_of_texts
from assay.generate.processes.estimates.durations import Durations
from assay.generate.processes.estimates.needs import (
    Needs,
    Widening,
    choose_widening,
    estimate_needs,
)
from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.requests import GoldenRequest, InputOptions
from assay.inputs import InputPlan
from assay.models.loading.loaded_model import load_outline
from assay.progress import format_duration
from assay.runs import Progress

# Fewer new tokens would leave no decode step.
_FEWEST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The inputs and the widening of a run, and the expected seconds of its phases."""

    inputs: InputOptions
    """Those of the request, with fewer new tokens where the budget is short."""
    widening: Widening = "at once"
    seconds: Sequence[float] = ()
    of_candidate: Sequence[float] = ()
    """The seconds of a candidate on the same device."""


def plan_run(
    request: GoldenRequest, device: Device, yardstick_dtype: str, progress: Progress
) -> RunPlan:
    """Estimate time, memory and disk, and plan a run within their limits.

    Raises: MachineError if memory, disk or the budget are too small.
    """
    try:
        estimator = _Estimator(request, device, yardstick_dtype)
        estimate = estimator.of(request.inputs)
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        limits = {
            "--disk": request.max_disk,
            "--memory": request.max_memory,
            "--budget": request.max_seconds,
        }
        report_unknown(error, limits, progress)
        return RunPlan(request.inputs)
    if request.max_seconds is not None:
        estimate = estimator.within(request.max_seconds, estimate)
        fewer, wanted = estimate.inputs.max_new_tokens, request.inputs.max_new_tokens
        if fewer < wanted:
            progress.note(f"--budget: each prompt gets {fewer} new tokens instead of {wanted}")
    needs = estimate.needs
    advice = "shorter --prompts, fewer --max-new-tokens, or --level logits"
    require_disk("the golden", needs.disk, Path(request.folder), request.max_disk, advice)
    widening = choose_widening(needs, allowed_memory(device, request.max_memory))
    progress.note(f"the reference needs {needs.describe(widening)}")
    if request.level != "module":
        return RunPlan(estimate.inputs, widening)
    progress.note(
        f"the reference takes about {format_duration(sum(estimate.seconds))}, and a candidate on"
        f" {request.reference.device} {format_duration(sum(estimate.of_candidate))}"
    )
    return RunPlan(estimate.inputs, widening, estimate.seconds, estimate.of_candidate)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The needs of a run with these inputs, and the seconds of its phases."""

    inputs: InputOptions
    needs: Needs
    seconds: list[float]
    of_candidate: list[float]


class _Estimator:
    """Estimates runs of one request with any inputs."""

    def __init__(self, request: GoldenRequest, device: Device, yardstick_dtype: str) -> None:
        self._request, self._yardstick_dtype = request, yardstick_dtype
        self._outline = load_outline(request.model, request.remote_code)
        self._trial = TrialCall.of(self._outline.model)
        self._num_weights = sum(one.numel() for one in self._outline.model.parameters())
        needs = self._needs(plan_inputs(request.inputs, self._outline))
        is_wide = needs.memory <= allowed_memory(device, request.max_memory)
        stored = None if is_wide else request.noise_for[0]
        products = self._trial.products
        self._wide = Speed.probe(device, yardstick_dtype, products, stored)
        self._narrow = [
            Speed.probe(trusted_device(device, dtype, self._num_weights), dtype, products)
            for dtype in request.noise_for
        ]
        self._candidate = Speed.probe(device, request.noise_for[0], products)

    def of(self, inputs: InputOptions) -> _Estimate:
        """Estimate a run with these inputs."""
        plan = plan_inputs(inputs, self._outline)
        needs = self._needs(plan)
        durations = Durations(
            self._trial,
            self._num_weights,
            needs.disk,
            plan.batches,
            reads_texts=bool(steps_of_texts(self._outline, plan.batches)),
        )
        seconds = [
            one for speed in self._narrow for one in durations.of_reference(self._wide, speed)
        ]
        return _Estimate(inputs, needs, seconds, durations.of_candidate(self._candidate))

    def _needs(self, plan: InputPlan) -> Needs:
        dtype, num_values = self._yardstick_dtype, self._trial.num_values
        return estimate_needs(self._request, self._outline, plan, dtype, num_values)

    def within(self, max_seconds: float, estimate: _Estimate) -> _Estimate:
        """Halve the number of new tokens until both sides fit into the budget.

        All prompts and the first steps are kept. Raises: MachineError if those take too long.
        """
        while (took := sum(estimate.seconds) + sum(estimate.of_candidate)) > max_seconds:
            num_new, generates = estimate.inputs.max_new_tokens, self._outline.can_generate
            if num_new <= _FEWEST_TOKENS or not generates:
                of_tokens = f" of {num_new} new tokens" if generates else ""
                raise MachineError(
                    f"the check{of_tokens} takes about {format_duration(math.ceil(took))}, but"
                    f" --budget allows {format_duration(max_seconds)}. Use shorter --prompts"
                )
            fewer = max(_FEWEST_TOKENS, num_new // 2)
            estimate = self.of(estimate.inputs.model_copy(update={"max_new_tokens": fewer}))
        return estimate
