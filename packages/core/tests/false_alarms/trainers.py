"""Trainers that compute in another way and are correct: none of them may fail.

Each class is given with `--candidate-trainer`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.batches import IGNORED, MicroBatch
from assay.training.reference import ReferenceTrainer


class FusedOptimizer(ReferenceTrainer):
    """AdamW in one kernel."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(_trainable(model), lr=self.plan.learning_rate, fused=True)


class OptimizerOneByOne(ReferenceTrainer):
    """AdamW for one parameter after the other, in groups of another order."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [one]} for one in reversed(_trainable(model))]
        return torch.optim.AdamW(groups, lr=self.plan.learning_rate, foreach=False)


class LossOfTheModel(ReferenceTrainer):
    """The model computes its loss itself, as trainers of public libraries let it."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        loss: Tensor = self.network(**micro_batch, num_items_in_batch=num_step_tokens).loss
        return loss


class LossBesideTheModels(ReferenceTrainer):
    """The model is given labels, and the loss that it computes is not the one that is used."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = self.network(**micro_batch).logits[:, :-1], micro_batch["labels"][:, 1:]
        total = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / num_step_tokens


class LossRowByRow(ReferenceTrainer):
    """Token losses are summed within rows first, by log-sum-exp instead of cross entropy."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        rows = zip(self._logits(micro_batch), micro_batch["labels"], strict=True)
        return sum((_summed(*row) for row in rows), start=torch.zeros(())) / num_step_tokens

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        output = self.network(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
        )
        logits_BTV: Tensor = output.logits
        return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))


class ExactClipping(ReferenceTrainer):
    """The norm is a sum over everything in float64."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients: list[Any] = [one.grad for one in _trainable(self.model) if one.grad is not None]
        squares = sum(float(one.double().square().sum()) for one in gradients)
        norm = float(squares**0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _summed(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    labels = labels_T[1:]
    counted = labels != IGNORED
    chosen = functional.one_hot(labels.clamp(min=0), logits_TV.shape[-1]).to(logits_TV.dtype)
    losses = logits_TV[:-1].logsumexp(-1) - (logits_TV[:-1] * chosen).sum(-1)
    return losses[counted].sum()
