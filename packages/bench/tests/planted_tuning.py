"""Trainers with one planted fault each."""

import torch
from torch import Tensor, nn

from assay.training.protocol import MicroBatch
from assay.training.trainers.reference import ReferenceTrainer


class ShuffledLabels(ReferenceTrainer):
    """Each row trains on its own tokens in another order."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        order = torch.randperm(micro_batch["labels"].shape[1])
        shuffled = {**micro_batch, "labels": micro_batch["labels"][:, order]}
        return super().compute_loss(shuffled, num_step_tokens)


class TenfoldLearningRate(ReferenceTrainer):
    """The learning rate is ten times too high."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= 10
        return optimizer


class LabelsShiftedTwice(ReferenceTrainer):
    """Both the data and the loss shift labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"].roll(-1, dims=1)
        labels[:, -1] = -100
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class LabelsNotShifted(ReferenceTrainer):
    """Each token is predicted from itself."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"].roll(1, dims=1)
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class HalfOfTheGradientLost(ReferenceTrainer):
    """Every other row contributes its loss but no gradient."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        kept, lost = (
            {name: tensor[start::2] for name, tensor in micro_batch.items()} for start in (0, 1)
        )
        with torch.no_grad():
            without_gradient = super().compute_loss(lost, num_step_tokens)
        return super().compute_loss(kept, num_step_tokens) + without_gradient
