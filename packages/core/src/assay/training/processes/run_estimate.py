"""Time, memory and disk of a training check, estimated before anything large is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from assay.devices.base import Device
from assay.dtypes import float_format
from assay.errors import MachineError
from assay.estimates.limits import allowed_memory, note_unknown, require_disk
from assay.estimates.speed import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    SECONDS_TO_LOAD,
    Speed,
)
from assay.estimates.trial_call import TrialCall
from assay.hooks.values.boundary import Boundary
from assay.models.loading.loaded_model import load_outline
from assay.models.size import SMALL_MODEL_PARAMETERS, count_parameters
from assay.progress import format_duration
from assay.runs import Progress
from assay.training.processes.golden import Batches
from assay.training.processes.requests import ReferenceRequest
from assay.training.protocol import can_keep_moments
from assay.training.trainers.adapters import add_lora

# Recorded of each trained weight in a step: its gradient before and after clipping, its update, two moments.
_RECORDED_PER_WEIGHT = 5
_MOMENTS = 2

# Recorded at a module boundary for each value of the forward pass: itself, and gradients of inputs and results.
_RECORDED_PER_VALUE = 3

# Matrix products of a step for each of the forward pass: gradients of inputs and of weights.
_PRODUCTS = 3

# Values that AdamW reads or writes for each trained weight.
_TOUCHED_BY_ADAMW = 12

# Wide values of each trained weight in memory: gradient, moments, and the weight before the step.
_WIDE_PER_TRAINED = 4

# Imports, the tensors of a call, and values that wait to be written.
_BASE_BYTES = 1000 << 20

# Seconds of Python in a micro-batch, in calls of the model without values: forward and backward.
_PLAIN_CALLS, _RECORDED_CALLS, _REPLAYED_CALLS = 1.5, 8.0, 12.0


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """The sizes of a model and its batches."""

    num_weights: int
    num_trained: int
    num_values: float
    """Numbers at all module boundaries for each token of the forward pass, with logits."""
    call: float
    """Seconds of one call of the model without values, which is the time of its Python."""
    num_tokens: int
    """Of all steps."""
    longest: int
    """Tokens of the largest micro-batch."""
    num_steps: int
    num_micro_batches: int
    """Of all steps."""
    resumed_steps: int

    @classmethod
    def of(cls, request: ReferenceRequest, batches: Batches) -> "TrainingSizes":
        """Measure the model of `request`, without its weights."""
        options = request.options
        outline = load_outline(options.model, options.remote_code)
        model = outline.model
        if options.lora:
            with torch.device("meta"):
                model = add_lora(model, options.adapter_dropout)
        trial, parameters = TrialCall.of(model), list(model.parameters())
        tokens = [one["input_ids"].numel() for step in batches for one in step]
        return cls(
            num_weights=sum(one.numel() for one in parameters),
            num_trained=sum(one.numel() for one in parameters if one.requires_grad),
            num_values=trial.num_values + outline.vocab_size,
            call=trial.seconds,
            num_tokens=sum(tokens),
            longest=max(tokens),
            num_steps=len(batches),
            num_micro_batches=len(tokens),
            resumed_steps=len(batches) - options.resume_at,
        )


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """What a training check needs. Memory and disk are in bytes; one number of seconds for each phase."""

    memory: int
    disk: int
    reference: Sequence[float]
    candidate: Sequence[float]
    """On the reference's device."""

    @classmethod
    def of(
        cls, sizes: TrainingSizes, dtype: str, wide: str, speeds: "tuple[Speed, Speed]"
    ) -> "TrainingEstimate":
        """Estimate a check of candidates in `dtype` with a yardstick in `wide`; speeds: of both."""
        narrow_itemsize, wide_itemsize = (getattr(torch, one).itemsize for one in (dtype, wide))
        of_moment = narrow_itemsize if can_keep_moments(dtype) else 4
        stored = (Boundary.exact_inputs_for(getattr(torch, dtype)).stored or torch.float64).itemsize
        state = sizes.num_weights * narrow_itemsize + sizes.num_trained * _MOMENTS * of_moment
        num_values = sizes.num_tokens * sizes.num_values * _RECORDED_PER_VALUE
        of_weights = sizes.num_steps * sizes.num_trained * _RECORDED_PER_WEIGHT
        golden = int(num_values + of_weights) * stored + (sizes.num_steps + 1) * state
        graph = sizes.longest * sizes.num_values * _RECORDED_PER_VALUE * wide_itemsize
        weights = sizes.num_weights + sizes.num_trained * _WIDE_PER_TRAINED
        load = SECONDS_TO_LOAD + sizes.num_weights * SECONDS_PER_LOADED_WEIGHT
        of_narrow, of_wide = (_training(sizes, one) for one in speeds)
        python = sizes.num_micro_batches * sizes.call
        compared = (num_values + of_weights) * SECONDS_PER_COMPARED_VALUE
        replayed = of_narrow + _REPLAYED_CALLS * python + compared
        in_float32 = 0.0
        if float_format(dtype).is_narrow:
            in_float32 = 0.8 * of_weights * SECONDS_PER_COMPARED_VALUE
        again = 1 + sizes.resumed_steps / sizes.num_steps
        return cls(
            memory=int(weights * wide_itemsize + state + graph) + _BASE_BYTES,
            disk=golden + 2 * state,
            reference=[
                load,
                of_wide + _RECORDED_CALLS * python + golden * SECONDS_PER_STORED_BYTE,
                load,
                of_narrow,
                replayed + in_float32,
            ],
            candidate=[
                load,
                load + again * of_narrow + 4 * state * SECONDS_PER_STORED_BYTE,
                replayed,
            ],
        )


def _training(sizes: TrainingSizes, speed: Speed) -> float:
    """Return the seconds of all steps of a plain run."""
    products = _PRODUCTS * sizes.num_tokens * sizes.num_weights * speed.product
    reads = sizes.num_micro_batches * _PRODUCTS * sizes.num_weights * speed.weight
    updates = sizes.num_steps * sizes.num_trained * _TOUCHED_BY_ADAMW * speed.weight
    return products + reads + updates + sizes.num_micro_batches * _PLAIN_CALLS * sizes.call


def plan_training(
    request: ReferenceRequest, batches: Batches, device: Device, wide: str, progress: Progress
) -> TrainingEstimate | None:
    """Estimate the check of `request`, and note the numbers.

    Returns: None for a small model without a limit, as the estimate takes as long as a part of its check,
        and for one that cannot be estimated.
    Raises: MachineError, with the numbers, if memory or disk do not suffice.
    """
    is_small = count_parameters(request.options.model) < SMALL_MODEL_PARAMETERS
    if is_small and request.max_disk is None:
        return None
    try:
        sizes = TrainingSizes.of(request, batches)
        speeds = Speed.probe(device, request.dtype), Speed.probe(device, wide)
        estimate = TrainingEstimate.of(sizes, request.dtype, wide, speeds)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        note_unknown(error, {"--disk": request.max_disk}, progress)
        return None
    require_disk(
        estimate.disk,
        Path(request.folder),
        request.max_disk,
        "fewer --steps, --lora, or a smaller model",
    )
    allowed = allowed_memory(device)
    if estimate.memory > allowed:
        raise MachineError(
            f"the reference needs about {estimate.memory / 1e9:.1f} GB of memory, and"
            f" {request.reference} has {allowed / 1e9:.1f} GB free: take --lora, or a smaller model"
        )
    progress.note(
        f"the reference needs about {estimate.memory / 1e9:.1f} GB of memory and"
        f" {estimate.disk / 1e9:.1f} GB of disk; it takes about"
        f" {format_duration(sum(estimate.reference))}, and a candidate on"
        f" {request.reference} {format_duration(sum(estimate.candidate))}"
    )
    return estimate
