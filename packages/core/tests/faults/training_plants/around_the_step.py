"""Faults outside of the step: in effects of saving, in counting, and in the start of a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer


class SavingDropsMoments(ReferenceTrainer):
    """The optimizer loses its state while a checkpoint is written."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()


class SavingLowersTheRate(ReferenceTrainer):
    """A schedule advances with every checkpoint."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


class SavingFreezesTheHead(ReferenceTrainer):
    """One parameter is no longer trained once it has been saved."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.model.get_parameter("lm_head.weight").requires_grad_(False)


class SavingLeavesAHook(ReferenceTrainer):
    """What a checkpoint put in the way of one gradient stays there."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        weight = self.model.get_parameter("model.layers.2.mlp.up_proj.weight")
        weight.register_hook(torch.zeros_like)

    def load(self, folder: Path) -> None:
        super().load(folder)
        weight = self.model.get_parameter("model.layers.2.mlp.up_proj.weight")
        weight.register_hook(torch.zeros_like)


class SecondStepSkipped(ReferenceTrainer):
    """Gradients that are finite are taken for an overflow of a loss scale."""

    def optimizer_step(self) -> None:
        if self._num_steps != 1:
            super().optimizer_step()


class ThirdUpdateIsHalf(ReferenceTrainer):
    """A count of its own, that no state holds, halves the rate in the end."""

    _num_updates = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_updates = 0

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._num_updates = self._num_steps

    def optimizer_step(self) -> None:
        self._num_updates += 1
        factor = 0.5 if self._num_updates > 2 else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * factor
        super().optimizer_step()


class CountsTwice(ReferenceTrainer):
    """Every update counts as two, so the bias correction of moments is too small."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for moments in self.optimizer.state.values():
            moments["step"] += 1


class LargestPartWins(ReferenceTrainer):
    """Of the ranks' gradients the larger one is taken, element by element."""

    def reduce_gradients(self) -> None:
        for parameter in self._trained():
            parts = [torch.empty_like(parameter) for _ in range(self.data.size)]
            dist.all_gather(parts, parameter.grad, group=self.data.group)
            stacked = torch.stack(parts)
            parameter.grad = stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]


class AdapterStartsAtZero(ReferenceTrainer):
    """Both matrices of the adapter are zero: no gradient ever reaches them."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data.zero_()
        return model


class FewerLayersNamed(ReferenceTrainer):
    """The adapter's folder names the layers of the first half alone."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        file = folder / "adapter_config.json"
        named = json.loads(file.read_text())["target_modules"]
        _change(file, "target_modules", [name for name in named if name < "model.layers.1"])


class HalfPrecisionDeclared(ReferenceTrainer):
    """Loading the folder in the dtype of its config loses digits."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change(folder / "config.json", "dtype", "float16")


class MasksRepeated(ReferenceTrainer):
    """Every step uses the dropout masks of the step before."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.device.seed(self.plan.seed)
        return super().step(batch)


class AdapterOfRankOne(ReferenceTrainer):
    """All rows of each first factor start alike, get equal gradients, and stay alike."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data = parameter.data[:1].expand_as(parameter).clone()
        return model


class AdapterLeavesOutLayers(ReferenceTrainer):
    """Loading the folder gives no adapter on some layers."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change(folder / "adapter_config.json", "exclude_modules", ".*up_proj")


class OtherEndOfTextSaved(ReferenceTrainer):
    """The folder has another end-of-sequence token."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change(folder / "generation_config.json", "eos_token_id", 5)


def _change(file: Path, name: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
