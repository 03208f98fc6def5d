"""Trainers that leave out, or count otherwise, a part of what they train on or of what they train."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from assay.training.protocol import MicroBatch
from assay.training.trainers.reference import ReferenceTrainer


class LastBackwardSkipped(ReferenceTrainer):
    """Of the last micro-batch of a step only the loss is computed."""

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        self._is_last = num_left == 0
        return super().accumulating(num_left)

    def backward(self, loss: Tensor) -> None:
        if not self._is_last:
            super().backward(loss)


class FirstMicroBatchTwice(ReferenceTrainer):
    """The first micro-batch of a step counts twice."""

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        self._is_first = num_left == self.plan.micro_batches - 1
        return super().accumulating(num_left)

    def backward(self, loss: Tensor) -> None:
        super().backward(2 * loss if self._is_first else loss)


class LabelsNotShifted(ReferenceTrainer):
    """Neither the collator nor the loss shifts the labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"].roll(1, dims=1)
        labels[:, 0] = -100
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class PromptsLearned(ReferenceTrainer):
    """Prompts are not masked in the labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        padding = micro_batch["attention_mask"] == 0
        labels = micro_batch["input_ids"].masked_fill(padding, -100)
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class NormsLeftOut(ReferenceTrainer):
    """The group of parameters without weight decay never gets to the optimizer."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kept = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        return torch.optim.AdamW(kept, lr=self.plan.learning_rate)
