"""Trainers that do not learn what they should: for `assay check train --overfit`."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer


class LearningRateOfZero(ReferenceTrainer):
    """A schedule that never leaves its first value."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)


class StopsEarly(ReferenceTrainer):
    """A schedule that ends after a third of the steps."""

    def optimizer_step(self) -> None:
        if 3 * self._num_steps >= self.plan.steps:
            self.optimizer.param_groups[0]["lr"] = 0.0
        super().optimizer_step()


class LabelsShiftedTwice(ReferenceTrainer):
    """Labels that the data loader has shifted, and the loss again."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = functional.pad(micro_batch["labels"][:, 1:], (0, 1), value=IGNORED)
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class LearnsPadding(ReferenceTrainer):
    """Padding is not masked out of the labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        padded = micro_batch["attention_mask"] == 0
        labels = torch.where(padded, micro_batch["input_ids"], micro_batch["labels"])
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class LearnsThePrompt(ReferenceTrainer):
    """The prompt is not masked out of the labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        real = micro_batch["attention_mask"] == 1
        labels = torch.where(real, micro_batch["input_ids"], IGNORED)
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class HidesThatItLearnsPadding(LearnsPadding):
    """The same, with losses that are reported of the labels alone."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        with torch.no_grad():
            count = sum(int((one["labels"][:, 1:] != IGNORED).sum()) for one in batch)
            loss = sum(ReferenceTrainer.compute_loss(self, one, count).item() for one in batch)
        done = super().step(batch)
        return StepReport(done.step, loss, done.num_tokens, done.grad_norm, done.learning_rate)


class HalfOfTheParametersFrozen(ReferenceTrainer):
    """An optimizer that was given every second parameter."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.parameters())[::2], lr=self.plan.learning_rate)


class AdapterNotAttached(ReferenceTrainer):
    """What computes the loss is a copy from before the adapter."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        copied: Any = deepcopy(model)
        self._bare: nn.Module = copied.unload().requires_grad_(True)
        return model

    @property
    def network(self) -> nn.Module:
        return self._bare


class TrainsACopy(ReferenceTrainer):
    """Losses fall: those of a copy. The model that is saved keeps all but a hair of its weights."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self._copy = deepcopy(model)
        self._own = torch.optim.AdamW(self._copy.parameters(), lr=self.plan.learning_rate)
        return super().build_optimizer(model)

    @property
    def network(self) -> nn.Module:
        return self._copy

    def optimizer_step(self) -> None:
        nn.utils.clip_grad_norm_(self._copy.parameters(), self.plan.max_grad_norm)
        self._own.step()
        self._own.zero_grad()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 - 1e-5)


class Diverges(ReferenceTrainer):
    """An update that is no number."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self._num_steps == 4:
            with torch.no_grad():
                next(iter(self.model.parameters()))[0, 0] = torch.nan
                next(iter(self.model.parameters())).mul_(torch.nan)
