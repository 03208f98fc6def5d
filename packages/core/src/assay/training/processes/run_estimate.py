"""Estimate time, memory and disk of `assay check train` before weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assay.devices.base import Device
from assay.devices.run_string import parse_run
from assay.devices.trusted import trusted_device
from assay.errors import AssayError, MachineError
from assay.estimates import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    Speed,
    TrialCall,
    allowed_memory,
    report_unknown,
    require_disk,
)
from assay.hooks.tensors import Boundary
from assay.models.load import SMALL_MODEL_PARAMETERS, count_parameters, load_outline
from assay.progress import format_duration, format_size
from assay.runs import Progress
from assay.training.batches import Batches
from assay.training.protocol import can_keep_moments
from assay.training.reports import TrainCheck
from assay.training.trainers.adapters import add_lora

# Results stored for each trained weight and step: its update and moments. On the host they are computed again
# from the stored gradient. Kernels of other devices may round differently, so their results are stored as well.
_RESULTS = 3
_MOMENTS = 2

# Recorded for each value of the forward pass: itself, and gradients of inputs and results of modules.
_RECORDED_PER_VALUE = 3

# Wide numbers of each trained weight in memory: gradient, moments, the weight before the step.
_WIDE_PER_TRAINED = 4

# Imports, the tensors of a call, and values that wait to be written.
_BASE_BYTES = 1000 << 20

# Approximate, on x86-64 with two cores: AdamW computed again, sums of its results, hashes and copies.
_SECONDS_PER_STEPPED_WEIGHT = 1.2e-7

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
    dtype: torch.dtype
    wide: torch.dtype
    moments: torch.dtype
    on_host: bool
    """True if the reference computes on the host."""

    @classmethod
    def of(cls, request: TrainCheck, batches: Batches, wide: str) -> "TrainingSizes":
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


def _time_reference(sizes: TrainingSizes, yardstick: Speed, noise: Speed) -> float:
    """Estimate the seconds of the reference: yardstick, free noise run, and measured noise run."""

    def train(speed: Speed) -> float:
        # A backward pass has a product for the gradient of the tokens and one for that of the weights.
        return 3 * sizes.trial.seconds(speed, len(sizes.tokens), sum(sizes.tokens))

    stepped = 2 * sizes.num_steps * sizes.num_trained * _SECONDS_PER_STEPPED_WEIGHT
    compared = sizes.boundary_values * SECONDS_PER_COMPARED_VALUE
    stored = sizes.golden_bytes * SECONDS_PER_STORED_BYTE
    load = 2 * sizes.num_weights * SECONDS_PER_LOADED_WEIGHT
    return load + train(yardstick) + 2 * train(noise) + stepped + compared + stored


def require_resources(
    request: TrainCheck, batches: Batches, device: Device, wide: str, progress: Progress
) -> None:
    """Note the memory, disk and time that the check of `request` needs.

    A small model without a limit has no estimate, which would take as long as a phase of its check.
    Raises: MachineError, with the numbers, if memory or disk do not suffice.
    """
    is_small = count_parameters(request.options.model) < SMALL_MODEL_PARAMETERS
    if is_small and request.max_disk is None:
        return
    try:
        sizes = TrainingSizes.of(request, batches, wide)
        trusted = trusted_device(device, request.dtype, sizes.num_weights)
        noise = Speed.probe(trusted, request.dtype)
        seconds = _time_reference(sizes, Speed.probe(device, wide), noise)
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        report_unknown(error, {"--disk": request.max_disk}, progress)
        return
    folder, advice = request.folder, "fewer --steps, --lora, or a smaller model"
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
        f" of disk; the reference takes about {format_duration(seconds)}"
    )
