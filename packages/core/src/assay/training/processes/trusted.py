"""The trusted trainer: as yardstick in a wide dtype, and as noise run in the candidate's."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assay.devices.base import Device
from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.models import load_model
from assay.models.loaded.inspection import inspect_load
from assay.progress import advance_task
from assay.training.processes.golden import Batches
from assay.training.processes.optimizer_noise import AdamWInFloat32
from assay.training.processes.requests import ReferenceRequest, TrainOptions
from assay.training.protocol import StepReport, can_keep_moments
from assay.training.replay.conditions import comparable, keep_no_cache
from assay.training.state.parameters import named_parameters
from assay.training.state.states import State, collect_state, inject_state, round_state
from assay.training.trainers.reference import ReferenceTrainer

if TYPE_CHECKING:
    from assay.models.loaded.report import LoadReport


class Trusted(ReferenceTrainer):
    """The reference trainer as yardstick or noise run.

    load_report: of the noise run, whether what it loaded is what the files say.
    """

    load_report: "LoadReport | None" = None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; where the run's dtype cannot keep its moments, in float32 around the parameters."""
        optimizer = super().build_optimizer(model)
        if can_keep_moments(parse_run(self.plan.run).dtype):
            return optimizer
        return AdamWInFloat32(optimizer.param_groups, lr=self.plan.learning_rate)


class Yardstick(Trusted):
    """Computes in a wide dtype, with weights and buffers that are rounded to `rounded_to`.

    Its attention is eager, whose masks have one form in all versions.
    """

    def __init__(self, rounded_to: str) -> None:
        super().__init__()
        self._rounded_to = rounded_to

    def load_pretrained(self, name: str) -> nn.Module:
        """The model, rounded before it is widened."""
        return load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            attention="eager",
            rounded_to=self._rounded_to,
            remote_code=self.plan.remote_code,
        ).model


class NoiseRun(Trusted):
    """Computes in the candidate's dtype, and under autocast to `autocast_to`.

    Its attention is what the candidate has by default: fused kernels compute the probabilities anew
    in backward, with eight times the error of those that were kept.
    """

    def __init__(self, autocast_to: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast_to = autocast_to

    def load_pretrained(self, name: str) -> nn.Module:
        """The model as it comes."""
        loaded = load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            remote_code=self.plan.remote_code,
        )
        self.load_report = inspect_load(loaded, self.plan.remote_code).report
        return loaded.model

    def computing(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        if self._autocast_to is None:
            return nullcontext()
        return torch.autocast(self.device_type, self._autocast_to)


def trusted_trainer(options: TrainOptions, dtype: str, wide: str | None) -> Trusted:
    """The yardstick in the dtype `wide`, or the noise run, for candidates in `dtype`.

    What a candidate under mixed precision does not compute with is in float32: a buffer is rounded
    where it is used, or not at all. So is an adapter, which peft keeps in float32 beside narrower
    weights: without autocast it would compute in that.
    """
    if wide is not None:
        return Yardstick("float32" if options.mixed_precision else dtype)
    is_narrow = options.mixed_precision and float_format(dtype).is_narrow
    return NoiseRun(getattr(torch, dtype) if is_narrow and options.lora else None)


class TrustedSide:
    """The trusted trainer, as yardstick in the dtype `wide` or as noise run.

    dtype: that it computes in.
    """

    def __init__(self, request: ReferenceRequest, device: Device, wide: str | None) -> None:
        self.request, self.device, self.dtype = request, device, wide or request.dtype
        run = f"{parse_run(request.reference).device}/{self.dtype}"
        self.trainer = trusted_trainer(request.options, request.dtype, wide)
        self.trainer.setup(request.options.plan(run))
        keep_no_cache(self.trainer.model)

    def rounded_state(self) -> State:
        """What the trainer has now, in numbers that the candidate can hold."""
        state, dtype = collect_state(self.trainer, self.device.torch_device), self.request.dtype
        moments = dtype if can_keep_moments(dtype) else "float32"
        return round_state(state, getattr(torch, dtype), getattr(torch, moments))

    def train_freely(self, batches: Batches, initial: State) -> list[StepReport]:
        """The steps of a run of which nothing is replaced."""
        inject_state(self.trainer, initial, self.device.torch_device)
        with comparable(self.dtype, self.device):
            reports = []
            for batch in batches:
                reports.append(self.trainer.step(batch))
                advance_task("steps")
            return reports

    def train_rounded(self, batches: Batches, initial: State) -> tuple[list[StepReport], State]:
        """Steps each of which starts from numbers that the candidate can hold, and where they end."""
        state, reports = initial, []
        with comparable(self.dtype, self.device):
            for batch in batches:
                inject_state(self.trainer, state, self.device.torch_device)
                reports.append(self.trainer.step(batch))
                state = self.rounded_state()
        return reports, state


def describe_model(trainer: ReferenceTrainer, name: str, num_parameters: int) -> dict[str, Any]:
    """What a verdict says of the model. Raises: UsageError if nothing of it is trained."""
    parameters = named_parameters(trainer.model)
    trainable = [item.name for item in parameters if item.tensor.requires_grad]
    if not trainable:
        raise UsageError(f"{name} has no trainable parameter")
    return {
        "name": name,
        "architecture": type(trainer.model).__name__,
        "num_parameters": num_parameters,
        "num_trainable": len(trainable),
    }
