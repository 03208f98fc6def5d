"""Trainers that compute in another way and are correct: none of them may fail.

Each class is given with `--candidate-trainer`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.batches import check_batch
from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport, TrainerTraits, TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer


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


class PositionsGiven(ReferenceTrainer):
    """Each row is given its positions, which models count by themselves for all rows at once."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        model.register_forward_pre_hook(_with_positions, with_kwargs=True)
        return model


class ExactClipping(ReferenceTrainer):
    """The norm is a sum over everything in float64."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients: list[Any] = [one.grad for one in _trainable(self.model) if one.grad is not None]
        squares = sum(float(one.double().square().sum()) for one in gradients)
        norm = float(squares**0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm


class ClippingByOneVector(ReferenceTrainer):
    """The norm is a sum over everything in float32, in one order: its error is 1,000 roundings."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients: list[Any] = [one.grad for one in _trainable(self.model) if one.grad is not None]
        norm = torch.cat([one.flatten().float() for one in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)


class EvaluatesInItsSteps(ReferenceTrainer):
    """Before each step the model is run without gradients, as for a validation loss."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.model.eval()
        with torch.no_grad():
            self.network(input_ids=batch[0]["input_ids"].to(self.device.torch_device))
        self.model.train()
        return super().step(batch)


class CountsInABuffer(ReferenceTrainer):
    """The model counts its steps in a buffer that the reference does not have."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        model.register_buffer("num_steps_seen", torch.zeros((), dtype=torch.long), persistent=False)
        return model

    def optimizer_step(self) -> None:
        self.model.get_buffer("num_steps_seen").add_(1)
        super().optimizer_step()


class ClipsInItsOptimizer(ReferenceTrainer):
    """Gradients are clipped in the step of the optimizer, as the trainer declares."""

    traits = TrainerTraits(invisible_phases={"clip": "the optimizer clips"})

    def clip_gradients(self, max_norm: float) -> float:
        gradients = [one.grad for one in self._trained() if one.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def optimizer_step(self) -> None:
        super().clip_gradients(self.plan.max_grad_norm)
        super().optimizer_step()


class KeepsSumsOfItsOwn(ReferenceTrainer):
    """Gradients are added up in separate tensors, and set before they are reduced."""

    traits = TrainerTraits(invisible_phases={"backward": "sums are moved to `.grad` later"})

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for one in self._trained():
            kept = getattr(one, "kept", None)
            one.kept = one.grad if kept is None else kept + one.grad  # type: ignore[attr-defined]
            one.grad = None

    def reduce_gradients(self) -> None:
        for one in self._trained():
            one.grad, one.kept = one.kept, None  # type: ignore[attr-defined]
        super().reduce_gradients()


class LossOfAllClasses(ReferenceTrainer):
    """Classes come second, and what is not learned is left out last; labels are used up."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits = self.network(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
        ).logits
        labels = micro_batch["labels"][:, 1:]
        counted = labels != IGNORED
        losses = functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), labels.clamp_(min=0), reduction="none"
        )
        return (losses * counted).sum() / num_step_tokens


class StepsOnCopies(ReferenceTrainer):
    """The optimizer has copies in float32, from which the model takes its weights."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.copies = [nn.Parameter(one.detach().float().clone()) for one in _trainable(model)]
        return torch.optim.AdamW(self.copies, lr=self.plan.learning_rate)

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        self.model.zero_grad(set_to_none=True)
        return super().train_on(own, num_tokens)

    def clip_gradients(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(_trainable(self.model), max_norm))

    def optimizer_step(self) -> None:
        for copy, one in zip(self.copies, _trainable(self.model), strict=True):
            copy.grad = None if one.grad is None else one.grad.float()
        super().optimizer_step()
        with torch.no_grad():
            for copy, one in zip(self.copies, _trainable(self.model), strict=True):
                one.copy_(copy)


class RoundsStochastically(ReferenceTrainer):
    """Weights of 16 bits, which an update in float32 rounds up or down by chance."""

    def optimizer_step(self) -> None:
        for one in self._trained():
            wide = nn.Parameter(one.detach().float())
            wide.grad = None if one.grad is None else one.grad.float()
            step = torch.optim.AdamW([wide], lr=self.plan.learning_rate)
            if one in self.optimizer.state:
                step.state[wide] = _in_dtype(self.optimizer.state[one], torch.float32)
            step.step()
            self.optimizer.state[one] = _in_dtype(step.state[wide], one.dtype)
            bits = wide.detach().view(torch.int32)
            drawn = torch.randint(0, 2**16, bits.shape, dtype=torch.int32)
            one.data.copy_(((bits + drawn) & -(2**16)).view(torch.float32))


class HasNoOptimizerStep(ReferenceTrainer):
    """Only the step of the optimizer itself shows clipped gradients and updates."""

    optimizer_step = None  # type: ignore[assignment]

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        num_tokens = check_batch(batch)
        self.optimizer.zero_grad(set_to_none=True)
        total = self.train_on(batch, num_tokens)
        norm = self.clip_gradients(self.plan.max_grad_norm)
        self.optimizer.step()
        self._num_steps += 1
        return StepReport(self._num_steps - 1, total, num_tokens, norm, self.plan.learning_rate)


def _in_dtype(moments: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Moments in `dtype`; the count of steps, which has no dimensions, as it is."""
    return {
        name: value.clone() if value.ndim == 0 else value.to(dtype)
        for name, value in moments.items()
    }


def _with_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    del model
    ids_BT = kwargs["input_ids"]
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    return args, kwargs | {"position_ids": positions_BT}


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _summed(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    labels = labels_T[1:]
    counted = labels != IGNORED
    chosen = functional.one_hot(labels.clamp(min=0), logits_TV.shape[-1]).to(logits_TV.dtype)
    losses = logits_TV[:-1].logsumexp(-1) - (logits_TV[:-1] * chosen).sum(-1)
    return losses[counted].sum()
