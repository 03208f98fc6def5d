"""Trainers with one fault each, for `assay smoke run --trainer`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.training.batches import MicroBatch
from assay.training.protocol import TrainingPlan
from assay.training.trainers.adapters import ADAPTER_FILE, read_adapter
from assay.training.trainers.reference import ReferenceTrainer


class MomentsDropped(ReferenceTrainer):
    """Megatron-LM#761."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        pass


class StepCountReset(ReferenceTrainer):
    """Megatron-LM#761: the moments are there, their bias correction starts anew."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        super().load_optimizer(state)
        for moments in self.optimizer.state.values():
            moments["step"] = torch.zeros_like(moments["step"])


class GeneratorsNotRestored(ReferenceTrainer):
    """Dropout goes on with other masks."""

    def load_generators(self, states: Mapping[str, Any]) -> None:
        pass


class DrawsAfterLoading(ReferenceTrainer):
    """Everything is restored, and then a number is drawn: no state shows it, the losses do."""

    _loaded = False

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._loaded = True

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        if self._loaded:
            torch.rand(1)
        self._loaded = False
        return super().compute_loss(micro_batch, num_step_tokens)


class AdapterSavedWithSizeZero(ReferenceTrainer):
    """peft#2450: the file is there and its tensors have no elements."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        empty = {name: torch.zeros(0) for name in read_adapter(folder)}
        save_file(empty, folder / ADAPTER_FILE)


class AdapterSavedWithoutTensors(ReferenceTrainer):
    """The file is there and holds nothing."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        save_file({}, folder / ADAPTER_FILE)


class AdapterNotSaved(ReferenceTrainer):
    """There is no file."""

    def save_model(self, folder: Path) -> None:
        pass


class OneTensorSavedAsZeros(ReferenceTrainer):
    """DeepSpeed#6791: one tensor of many is zero."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        tensors = read_adapter(folder)
        name = min(name for name in tensors if "lora_B" in name)
        assert tensors[name].any()
        save_file(tensors | {name: torch.zeros_like(tensors[name])}, folder / ADAPTER_FILE)


class ParametersFrozen(ReferenceTrainer):
    """accelerate#2665: the optimizer holds copies of the parameters."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
        return torch.optim.AdamW(copies, lr=self.plan.learning_rate)


class BaseNotFrozen(ReferenceTrainer):
    """The model under the adapter is trained with it."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        return super().build_model(plan).requires_grad_()


class LossIsNaN(ReferenceTrainer):
    """As float16 does when it overflows."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) * torch.nan
