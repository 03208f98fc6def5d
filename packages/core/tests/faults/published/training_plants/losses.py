"""Faults of losses and of gradients that are added up, each beside the same code without it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport
from assay.training.state.files import read_state, write_state
from assay.training.trainers.reference import ReferenceTrainer


class OwnLoss(ReferenceTrainer):
    """No fault: the loss of each token by itself, and their sum."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        losses = self.token_losses(self.logits(micro_batch), self.targets(micro_batch))
        return self.reduce(losses) / num_step_tokens

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        logits: Tensor = self.network(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
        ).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))[:, :-1]

    def targets(self, micro_batch: MicroBatch) -> Tensor:
        """What the logits of each position but the last are to predict."""
        return micro_batch["labels"][:, 1:]

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """By row and position."""
        return functional.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        )

    def reduce(self, losses: Tensor) -> Tensor:
        return losses.sum()


class ShiftedTwice(OwnLoss):
    """transformers#47394: labels that were shifted are shifted again, the target is token t + 2."""

    def targets(self, micro_batch: MicroBatch) -> Tensor:
        once = micro_batch["labels"][:, 1:]
        return functional.pad(once[:, 1:], (0, 1), value=IGNORED)


class MaskedByMask(OwnLoss):
    """No fault: labels of padding are left out once more."""

    def targets(self, micro_batch: MicroBatch) -> Tensor:
        return super().targets(micro_batch).masked_fill(self.is_padding(micro_batch), IGNORED)

    def is_padding(self, micro_batch: MicroBatch) -> Tensor:
        """Of the positions that are predicted."""
        return micro_batch["attention_mask"][:, 1:] == 0


class MaskedById(MaskedByMask):
    """transformers#23530: padding has the id of a token of texts, which is never learned then."""

    def is_padding(self, micro_batch: MicroBatch) -> Tensor:
        model: Any = self.model
        padding: int = model.config.pad_token_id
        return micro_batch["input_ids"][:, 1:].eq(padding)


class ZLossAlwaysOn(OwnLoss):
    """OLMo-core#702: a coefficient of 0 is taken for none, and the default used."""

    configured = 0.0

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        coefficient = self.configured or 1e-4
        squares = logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0)
        return super().token_losses(logits, targets) + coefficient * squares


class EachReplicaDividesByAll(OwnLoss):
    """transformers#37474: of two replicas each divides by all tokens, and then comes their mean."""

    def reduce(self, losses: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in losses.flatten().chunk(2)]).mean()


class EachReplicaAddsItsShare(OwnLoss):
    """No fault."""

    def reduce(self, losses: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in losses.flatten().chunk(2)]).sum()


class WeightedLoss(OwnLoss):
    """No fault: a fused loss without reduction, whose tokens are weighted afterwards."""

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = _FusedLosses.apply(logits, targets, self.scale)  # type: ignore[no-untyped-call]
        return losses * (targets != IGNORED)

    def scale(self, gradient: Tensor) -> Tensor:
        """By what the gradient of each token's logits is multiplied."""
        return gradient


class FirstTokensWeightForAll(WeightedLoss):
    """Liger-Kernel#968: the gradient that arrives is taken to be one number, that of token 0."""

    def scale(self, gradient: Tensor) -> Tensor:
        return gradient.flatten()[0].expand_as(gradient)


class _FusedLosses(torch.autograd.Function):
    """Cross entropies whose gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: Any) -> Tensor:
        ignored = targets == IGNORED
        known = targets.masked_fill(ignored, 0)
        logs = logits.log_softmax(-1)
        ctx.save_for_backward(
            (logs.exp() - functional.one_hot(known, logits.shape[-1])) * ~ignored[..., None]
        )
        ctx.scale = scale
        return -logs.gather(-1, known[..., None])[..., 0].masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return kept * ctx.scale(gradient)[..., None], None, None


class OwnBuffers(ReferenceTrainer):
    """No fault: gradients of micro-batches are added up in buffers, the first is a copy."""

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        self._number = 0
        return super().train_on(own, num_tokens)

    def backward(self, loss: Tensor) -> None:
        before = [parameter.grad for parameter in self._trained()]
        for parameter in self._trained():
            parameter.grad = None
        super().backward(loss)
        for parameter, kept in zip(self._trained(), before, strict=True):
            if kept is not None and not self.starts_anew():
                parameter.grad = self.add(kept, parameter)
        self._number += 1

    def starts_anew(self) -> bool:
        """Whether this micro-batch's gradient replaces what the buffer holds."""
        return self._number == 0

    def add(self, kept: Tensor, parameter: nn.Parameter) -> Tensor:
        return kept if parameter.grad is None else kept + parameter.grad


class FirstMicroBatchOverwritten(OwnBuffers):
    """DeepSpeed#6550: micro-batches are counted from 1 in the first step, and copied at 1."""

    def starts_anew(self) -> bool:
        return self._number == (1 if self._num_steps == 0 else 0)


class AddedUpInBfloat16(OwnBuffers):
    """Megatron-LM#149: the buffer of a float32 run is rounded with each micro-batch."""

    def add(self, kept: Tensor, parameter: nn.Parameter) -> Tensor:
        return super().add(kept, parameter).bfloat16().to(kept.dtype)


class GradientsKept(ReferenceTrainer):
    """StackOverflow 60335387: gradients of the steps before are not set to zero."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        optimizer.zero_grad = _do_nothing  # type: ignore[method-assign, assignment]
        return optimizer


class GradientsSetToZero(ReferenceTrainer):
    """No fault."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        optimizer.zero_grad = lambda set_to_none=True: _set_to_none(optimizer)  # type: ignore[method-assign]
        return optimizer


class DynamicScale(ReferenceTrainer):
    """No fault: a loss scale that grows every second step, taken off before it does."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.scale = 1024.0
        return super().build_optimizer(model)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.scale)

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        self.unscale()
        self.grow()

    def unscale(self) -> None:
        for parameter in self._trained():
            if parameter.grad is not None:
                parameter.grad /= self.scale

    def grow(self) -> None:
        if self._num_steps % 2:
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.scale = state.get("scale", self.scale)

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_state(folder / "scale", {"scale": self.scale})

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.scale = read_state(folder / "scale")["scale"]


class ScaleGrowsFirst(DynamicScale):
    """DeepSpeed#8588: the scale is updated before the gradients are divided by it."""

    def reduce_gradients(self) -> None:
        ReferenceTrainer.reduce_gradients(self)
        self.grow()
        self.unscale()


class StepsOfOwn(ReferenceTrainer):
    """No fault: rows of a micro-batch are put together one by one."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        return super().step([self.collate(one) for one in batch])

    def collate(self, micro_batch: MicroBatch) -> MicroBatch:
        return {name: torch.stack(self.rows(tensor)) for name, tensor in micro_batch.items()}

    def rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor)


class BatchTakenForOneSample(StepsOfOwn):
    """transformers#34204: a batch is flattened to one sample, what comes after the first is lost."""

    def rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor)[:1]


def _do_nothing(*, set_to_none: bool = True) -> None:
    del set_to_none


def _set_to_none(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
