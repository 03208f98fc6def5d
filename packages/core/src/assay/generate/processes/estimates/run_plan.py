"""Plan a run that fits on this machine and into its budget, before weights are loaded."""

import math
from dataclasses import dataclass
from pathlib import Path

from assay.devices.base import Device
from assay.devices.trusted import trusted_device
from assay.errors import AssayError, MachineError
from assay.estimates.limits import allowed_memory, report_unknown, require_disk
from assay.estimates.speed import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    Speed,
)
from assay.estimates.trial_call import TrialCall
from assay.generate.passes.generation_loop import count_tokens
from assay.generate.passes.whole_texts import steps_of_texts
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
    """The inputs and the widening of a run."""

    inputs: InputOptions
    """Those of the request, with fewer new tokens where the budget is short."""
    widening: Widening = "at once"


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
    if request.level == "module":
        progress.note(
            f"the reference takes about {format_duration(estimate.reference)}, and a candidate on"
            f" {request.reference.device} {format_duration(estimate.candidate)}"
        )
    return RunPlan(estimate.inputs, widening)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The needs of a run with these inputs, and the seconds of both sides."""

    inputs: InputOptions
    needs: Needs
    reference: float
    candidate: float
    """On the reference's device."""

    @property
    def seconds(self) -> float:
        """Seconds of both sides."""
        return self.reference + self.candidate


class _Estimator:
    """Estimates runs of one request with any inputs."""

    def __init__(self, request: GoldenRequest, device: Device, yardstick_dtype: str) -> None:
        self._request, self._yardstick_dtype = request, yardstick_dtype
        self._outline = load_outline(request.model, request.remote_code)
        self._trial = TrialCall.of(self._outline.model)
        self._num_weights = sum(one.numel() for one in self._outline.model.parameters())
        needs = self._needs(plan_inputs(request.inputs, self._outline))
        is_wide = needs.memory <= allowed_memory(device, request.max_memory)
        candidate = request.noise_for[0]
        self._wide = Speed.probe(device, yardstick_dtype, None if is_wide else candidate)
        self._candidate = Speed.probe(device, candidate)
        trusted = trusted_device(device, candidate, self._num_weights)
        self._noise = Speed.probe(trusted, candidate)

    def of(self, inputs: InputOptions) -> _Estimate:
        """Estimate a run with these inputs."""
        plan = plan_inputs(inputs, self._outline)
        needs = self._needs(plan)
        num_prompt_tokens = sum(len(one.rows) * one.length for one in plan.batches)
        num_tokens = count_tokens(plan.batches)
        steps = sum(max(1, one.max_new_tokens) for one in plan.batches), num_prompt_tokens
        reads_texts = steps_of_texts(self._outline, plan.batches)
        texts = (len(plan.batches), num_tokens) if reads_texts else steps
        load = self._num_weights * SECONDS_PER_LOADED_WEIGHT
        replay = num_tokens * self._trial.num_values * SECONDS_PER_COMPARED_VALUE
        # The yardstick generates and records; the noise run is forced and replays.
        reference = 2 * load + replay + needs.disk * SECONDS_PER_STORED_BYTE
        for speed, passes in ((self._wide, (steps, texts)), (self._noise, (texts, texts))):
            reference += sum(self._trial.seconds(speed, *one) for one in passes)
        # The candidate generates, is forced where its tokens differ, and replays.
        candidate = load + replay + 2.5 * self._trial.seconds(self._candidate, *steps)
        return _Estimate(inputs, needs, len(self._request.noise_for) * reference, candidate)

    def _needs(self, plan: InputPlan) -> Needs:
        dtype, num_values = self._yardstick_dtype, self._trial.num_values
        return estimate_needs(self._request, self._outline, plan, dtype, num_values)

    def within(self, max_seconds: float, estimate: _Estimate) -> _Estimate:
        """Halve the number of new tokens until both sides fit into the budget.

        All prompts and the first steps are kept. Raises: MachineError if those take too long.
        """
        while estimate.seconds > max_seconds:
            num_new, generates = estimate.inputs.max_new_tokens, self._outline.can_generate
            if num_new <= _FEWEST_TOKENS or not generates:
                of_tokens = f" of {num_new} new tokens" if generates else ""
                raise MachineError(
                    f"the check{of_tokens} takes about {format_duration(math.ceil(estimate.seconds))},"
                    f" but --budget allows {format_duration(max_seconds)}. Use shorter --prompts"
                )
            fewer = max(_FEWEST_TOKENS, num_new // 2)
            estimate = self.of(estimate.inputs.model_copy(update={"max_new_tokens": fewer}))
        return estimate
