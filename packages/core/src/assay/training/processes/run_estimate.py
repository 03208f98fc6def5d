"""Estimate time, memory and disk of `assay check train` before weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from assay.devices.base import Device
from assay.devices.run_string import parse_run
from assay.devices.trusted import trusted_device
from assay.errors import AssayError, MachineError
from assay.estimates.limits import allowed_memory, report_unknown, require_disk
from assay.estimates.products import Product
from assay.estimates.speed import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    SECONDS_TO_LOAD,
    Speed,
    seconds_per_new_value,
)
from assay.estimates.trial_call import TrialCall
from assay.hooks.values.boundary import Boundary
from assay.models.loading.loaded_model import load_outline
from assay.models.size import SMALL_MODEL_PARAMETERS, count_parameters
from assay.progress import format_duration, format_size
from assay.runs import Progress
from assay.training.processes.golden import Batches
from assay.training.processes.requests import ReferenceRequest
from assay.training.protocol import can_keep_moments
from assay.training.trainers.adapters import add_lora

# Values compared for each trained weight and step: its gradient before and after clipping; its update and
# moments. Only one gradient is always stored. On the host the results are computed again from it. Kernels of
# other devices may round differently, so results from those are stored as well.
_GRADIENTS, _RESULTS = 2, 3
_MOMENTS = 2

# Recorded for each value of the forward pass: itself, and gradients of inputs and results of modules.
_RECORDED_PER_VALUE = 3

# Values that AdamW reads or writes for each trained weight.
_TOUCHED_BY_ADAMW = 12

# Wide numbers of each trained weight in memory: gradient, moments, the weight before the step.
_WIDE_PER_TRAINED = 4

# Imports, the tensors of a call, and values that wait to be written.
_BASE_BYTES = 1000 << 20

# Seconds of Python in a micro-batch, in calls of the model without values: forward and backward.
_PLAIN_CALLS, _RECORDED_CALLS, _REPLAYED_CALLS = 1.5, 8.0, 12.0

# Values in new memory for each trained weight and step: AdamW computed again, hashes, copies, states read
# and written.
_NEW_PER_STEPPED_WEIGHT = 40

# States that a candidate writes and reads again as checkpoints.
_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """The sizes of a model, its batches and its dtypes."""

    num_weights: int
    num_trained: int
    num_values: float
    """Numbers at all module boundaries for each token of the forward pass, with logits."""
    trial: TrialCall
    tokens: Sequence[int]
    """Of each micro-batch of the run."""
    num_steps: int
    resumed_steps: int
    dtype: torch.dtype
    wide: torch.dtype
    moments: torch.dtype
    on_host: bool
    """True if the reference computes on the host."""

    @classmethod
    def of(cls, request: ReferenceRequest, batches: Batches, wide: str) -> "TrainingSizes":
        """Measure the model of `request`, without its weights; wide: the dtype of the yardstick."""
        options = request.options
        outline = load_outline(options.model, options.remote_code)
        model = outline.model
        if options.lora:
            with torch.device("meta"):
                model = add_lora(model, options.adapter_dropout)
        trial, parameters = TrialCall.of(model), list(model.parameters())
        moments = request.dtype if can_keep_moments(request.dtype) else "float32"
        return cls(
            num_weights=sum(one.numel() for one in parameters),
            num_trained=sum(one.numel() for one in parameters if one.requires_grad),
            num_values=trial.num_values + outline.vocab_size,
            trial=trial,
            tokens=[one["input_ids"].numel() for step in batches for one in step],
            num_steps=len(batches),
            resumed_steps=len(batches) - options.resume_at,
            dtype=getattr(torch, request.dtype),
            wide=getattr(torch, wide),
            moments=getattr(torch, moments),
            on_host=parse_run(request.reference).device == "cpu",
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and moments, rounded to the candidate's dtype."""
        moments = _MOMENTS * self.num_trained * self.moments.itemsize
        return self.num_weights * self.dtype.itemsize + moments

    @property
    def golden_bytes(self) -> int:
        """Bytes of the golden: values at module boundaries, gradients of weights, states."""
        stored = Boundary.exact_inputs_for(self.dtype).stored or torch.float64
        of_weight = 1 if self.on_host else 1 + _RESULTS
        num_recorded = self.boundary_values + self.num_steps * self.num_trained * of_weight
        return int(num_recorded * stored.itemsize) + (self.num_steps + 1) * self.state_bytes

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the yardstick."""
        weights = self.num_weights + _WIDE_PER_TRAINED * self.num_trained
        graph = max(self.tokens) * self.num_values * _RECORDED_PER_VALUE
        return int((weights + graph) * self.wide.itemsize) + self.state_bytes + _BASE_BYTES

    @property
    def boundary_values(self) -> float:
        """Number of recorded values at module boundaries, over all steps."""
        return sum(self.tokens) * self.num_values * _RECORDED_PER_VALUE


class TrainingSpeed(NamedTuple):
    """The speed of a device in both passes of a training step.

    One pass can be ten times as fast as the other, as bfloat16 is on processors without instructions for
    it: it depends on the order in which a weight is stored. Gradients of weights are about as fast as the
    faster pass.
    """

    forward: Speed
    backward: Speed
    """Of the gradients of inputs."""

    @property
    def product(self) -> float:
        """Seconds of both passes and of the gradients of weights, for each weight and token."""
        products = [one.product for one in self]
        return sum(products) + min(products)

    @classmethod
    def probe(cls, device: Device, dtype: str, products: Sequence[Product]) -> "TrainingSpeed":
        """Measure the speed of a model's `products`, and of their gradients."""
        backward = [one.backward for one in products]
        return cls(Speed.probe(device, dtype, products), Speed.probe(device, dtype, backward))


@dataclass(frozen=True, slots=True)
class TrainingDurations:
    """The seconds of each phase of both sides."""

    reference: Sequence[float]
    candidate: Sequence[float]
    """On the reference's device."""

    @classmethod
    def of(
        cls,
        sizes: TrainingSizes,
        new_value: float,
        yardstick: TrainingSpeed,
        noise: TrainingSpeed,
        candidate: TrainingSpeed,
    ) -> "TrainingDurations":
        """Estimate the phases from the seconds of a new value and the speeds of the three runs."""
        load = SECONDS_TO_LOAD + sizes.num_weights * SECONDS_PER_LOADED_WEIGHT
        python = len(sizes.tokens) * sizes.trial.seconds
        trained = sizes.num_steps * sizes.num_trained
        of_results = _RESULTS * trained * SECONDS_PER_COMPARED_VALUE
        compared = (sizes.boundary_values + _GRADIENTS * trained) * SECONDS_PER_COMPARED_VALUE
        stepped = trained * _NEW_PER_STEPPED_WEIGHT * new_value
        replayed = _REPLAYED_CALLS * python + compared + of_results + stepped
        of_noise, plain = (_time_training(sizes, speed) for speed in (noise, candidate))
        stored = sizes.golden_bytes * SECONDS_PER_STORED_BYTE
        saved = 2 * _CHECKPOINTS * sizes.state_bytes * SECONDS_PER_STORED_BYTE
        again = 1 + sizes.resumed_steps / sizes.num_steps
        return cls(
            reference=[
                load,
                _time_training(sizes, yardstick) + _RECORDED_CALLS * python + stored + stepped,
                load,
                of_noise,
                of_noise + replayed,
            ],
            candidate=[load, load + again * plain + saved, plain + replayed],
        )


def _time_training(sizes: TrainingSizes, speed: TrainingSpeed) -> float:
    """Return the seconds of all steps of a plain run."""
    multiplied = sum(sizes.tokens) * sizes.trial.num_multiplied * speed.product
    touched = sizes.num_steps * sizes.num_trained * _TOUCHED_BY_ADAMW
    updates = touched * min(one.weight for one in speed)
    return multiplied + updates + len(sizes.tokens) * _PLAIN_CALLS * sizes.trial.seconds


def plan_training(
    request: ReferenceRequest, batches: Batches, device: Device, wide: str, progress: Progress
) -> TrainingDurations | None:
    """Estimate the check of `request`, and note the numbers.

    Returns: None if the model cannot be estimated, or is small and has no limit. The estimate of a small
        model takes as long as a phase of its check.
    Raises: MachineError, with the numbers, if memory or disk do not suffice.
    """
    is_small = count_parameters(request.options.model) < SMALL_MODEL_PARAMETERS
    if is_small and request.max_disk is None:
        return None
    try:
        sizes = TrainingSizes.of(request, batches, wide)
        trusted = trusted_device(device, request.dtype, sizes.num_weights)
        runs = (device, wide), (trusted, request.dtype), (device, request.dtype)
        speeds = (TrainingSpeed.probe(*run, sizes.trial.products) for run in runs)
        durations = TrainingDurations.of(sizes, seconds_per_new_value(device, wide), *speeds)
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        report_unknown(error, {"--disk": request.max_disk}, progress)
        return None
    folder, advice = Path(request.folder), "fewer --steps, --lora, or a smaller model"
    require_disk("the golden", sizes.golden_bytes, folder, request.max_disk, advice)
    disk = sizes.golden_bytes + _CHECKPOINTS * sizes.state_bytes
    require_disk("the check", disk, folder, None, advice)
    memory, allowed = sizes.memory_bytes, allowed_memory(device)
    if memory > allowed:
        raise MachineError(
            f"the reference needs about {format_size(memory)} of memory, but {request.reference} has"
            f" {format_size(allowed)} free. Use --lora, or a smaller model"
        )
    progress.note(
        f"the reference needs about {format_size(memory)} of memory, and the check {format_size(disk)}"
        f" of disk; the reference takes about {format_duration(sum(durations.reference))}, and a"
        f" candidate on {device.name} {format_duration(sum(durations.candidate))}"
    )
    return durations
