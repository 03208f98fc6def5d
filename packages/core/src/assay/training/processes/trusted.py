"""The trusted trainer, as yardstick in a wide dtype or as noise run in the candidate's dtype."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assay.devices.base import Device
from assay.devices.run_string import parse_run
from assay.devices.trusted import trusted_device
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.models import count_parameters, load_model
from assay.models.inspect.inspection import inspect_load
from assay.models.load import yardstick_dtype
from assay.progress import advance_task
from assay.training.processes.golden import Batches
from assay.training.processes.optimizer_noise import AdamWInFloat32
from assay.training.processes.requests import TrainCheck, TrainOptions
from assay.training.protocol import StepReport, TrainingPlan, can_keep_moments
from assay.training.replay.conditions import comparable, keep_no_cache
from assay.training.state.files import state_file, write_state
from assay.training.state.parameters import named_parameters
from assay.training.state.states import State, current_state, inject_state, round_state
from assay.training.trainers.reference import ReferenceTrainer

if TYPE_CHECKING:
    from assay.models.inspect.report import LoadReport


class TrustedTrainer(ReferenceTrainer):
    """The reference trainer as yardstick or noise run."""

    load_report: "LoadReport | None" = None
    """Findings of the noise run from loading the model."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW, with arithmetic in float32 if the run's dtype cannot keep its moments."""
        optimizer = super().build_optimizer(model)
        if can_keep_moments(parse_run(self.plan.run).dtype):
            return optimizer
        return AdamWInFloat32(optimizer.param_groups, lr=self.plan.learning_rate)


class Yardstick(TrustedTrainer):
    """Computes in a wide dtype, with weights and buffers rounded to `rounded_to`.

    Its attention is eager, because eager masks have one form in all versions of transformers.
    """

    def __init__(self, rounded_to: str) -> None:
        super().__init__()
        self._rounded_to = rounded_to

    def load_pretrained(self, name: str) -> nn.Module:
        """Load the model, round it, and widen it."""
        return load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            attention="eager",
            rounded_to=self._rounded_to,
            remote_code=self.plan.remote_code,
        ).model


class NoiseTrainer(TrustedTrainer):
    """Computes in the candidate's dtype, under autocast to `autocast_to` if given.

    Its attention is the candidate's default: fused kernels recompute the probabilities in backward,
    with eight times the error of stored ones.
    """

    def __init__(self, autocast_to: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast_to = autocast_to

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer, and choose how the device computes."""
        super().setup(plan)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.device = trusted_device(self.device, parse_run(plan.run).dtype, num_parameters)

    def load_pretrained(self, name: str) -> nn.Module:
        """Load the model, and inspect what was loaded."""
        loaded = load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            remote_code=self.plan.remote_code,
        )
        self.load_report = inspect_load(loaded, self.plan.remote_code).report
        return loaded.model

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of each forward pass."""
        if self._autocast_to is None:
            return nullcontext()
        return torch.autocast(self.device_type, self._autocast_to)


def trusted_trainer(options: TrainOptions, dtype: str, wide: str | None) -> TrustedTrainer:
    """Return the yardstick in the dtype `wide`, or the noise run, for candidates in `dtype`.

    Under mixed precision a candidate's weights and buffers are in float32, and rounded only where
    they are used. The same holds for an adapter, which peft keeps in float32 next to narrower
    weights; without autocast it would compute in float32.
    """
    if wide is not None:
        return Yardstick("float32" if options.mixed_precision else dtype)
    is_narrow = options.mixed_precision and float_format(dtype).is_narrow
    return NoiseTrainer(getattr(torch, dtype) if is_narrow and options.lora else None)


def wide_dtype(model: str, device: Device) -> str:
    """Return the yardstick's dtype for MODEL on `device`."""
    return yardstick_dtype(count_parameters(model), device.supported_dtypes())


class TrustedSide:
    """Opens a trusted trainer, as yardstick in the dtype `wide` or as noise run, and trains it."""

    def __init__(self, request: TrainCheck, device: Device, wide: str | None) -> None:
        self.request, self.device, self.dtype = request, device, wide or request.dtype
        run = f"{parse_run(request.reference).device}/{self.dtype}"
        self.trainer = trusted_trainer(request.options, request.dtype, wide)
        self.trainer.setup(request.options.plan(run))
        keep_no_cache(self.trainer.model)

    def begin(self) -> tuple[dict[str, Any], State]:
        """Describe the model for a verdict, and write the state before the first step into the golden.

        Raises: UsageError if the model has no trainable parameter.
        """
        model, name = self.trainer.model, self.request.options.model
        num_trainable = sum(item.tensor.requires_grad for item in named_parameters(model))
        if not num_trainable:
            raise UsageError(f"{name} has no trainable parameter")
        facts = {
            "name": name,
            "architecture": type(model).__name__,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "num_trainable": num_trainable,
        }
        initial = self.rounded_state()
        write_state(state_file(self.request.folder, 0), initial)
        return facts, initial

    def rounded_state(self) -> State:
        """Return the trainer's current state, rounded to the candidate's dtype."""
        state, dtype = current_state(self.trainer, self.device.torch_device), self.request.dtype
        moments = dtype if can_keep_moments(dtype) else "float32"
        return round_state(state, getattr(torch, dtype), getattr(torch, moments))

    def train_freely(self, batches: Batches, initial: State) -> list[StepReport]:
        """Train without injection."""
        inject_state(self.trainer, initial, self.device.torch_device)
        with comparable(self.dtype, self.device):
            reports = []
            for batch in batches:
                reports.append(self.trainer.step(batch))
                advance_task("steps")
            return reports

    def train_rounded(self, batches: Batches, initial: State) -> tuple[list[StepReport], State]:
        """Train with the state rounded to the candidate's dtype before each step; return its end."""
        state, reports = initial, []
        with comparable(self.dtype, self.device):
            for batch in batches:
                inject_state(self.trainer, state, self.device.torch_device)
                reports.append(self.trainer.step(batch))
                state = self.rounded_state()
        return reports, state
