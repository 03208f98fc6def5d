"""Trainers by the conventions of public libraries, with one fault each.

Their correct neighbours: `tests/false_alarms/library_trainers.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport
from assay.training.trainers.parallel import DDPTrainer
from assay.training.trainers.reference import ReferenceTrainer

SCALE = 65536.0


class AveragedWithoutFactor(DDPTrainer):
    """DistributedDataParallel averages gradients of losses that are shares of the step's already."""

    def distribute(self, model: nn.Module) -> nn.Module:
        self._replica = DistributedDataParallel(model, process_group=self.data.group)
        return model


class FactorOfRanksAddedUp(DDPTrainer):
    """The loss is multiplied by the ranks, and gradients are added up instead of averaged."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) * self.data.size


class _Scaled(ReferenceTrainer):
    """Mixed precision: the loss is scaled in backward."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * SCALE)

    def divide(self, factor: float) -> None:
        for parameter in self._trained():
            if parameter.grad is not None:
                parameter.grad /= factor


class ClippedBeforeUnscaling(_Scaled):
    """Gradients are clipped to a norm that has the scale in it."""

    def optimizer_step(self) -> None:
        self.divide(SCALE)
        super().optimizer_step()


class UnscaledAfterClipping(_Scaled):
    """Unscaled in the same method, one line too late."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = super().clip_gradients(max_norm)
        self.divide(SCALE)
        return norm


class ScaledTwice(_Scaled):
    """The loss is scaled by the loop and by the library, and unscaled once."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * SCALE)  # which scales it, too

    def clip_gradients(self, max_norm: float) -> float:
        self.divide(SCALE)
        return super().clip_gradients(max_norm)


class UnscaledByAnotherFactor(_Scaled):
    """The scale is halved between backward and unscaling."""

    def clip_gradients(self, max_norm: float) -> float:
        self.divide(SCALE / 2)
        return super().clip_gradients(max_norm)


class ReducedByAnotherFactor(_Scaled):
    """The scale is taken off where gradients are added up, and not all of it."""

    def reduce_gradients(self) -> None:
        self.divide(SCALE / 2)


class AveragedSharesUnderAScale(_Scaled):
    """A scaled loss, whose share each rank has already, is averaged over ranks and then unscaled."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        self.divide(self.data.size)

    def clip_gradients(self, max_norm: float) -> float:
        self.divide(SCALE)
        return super().clip_gradients(max_norm)


class UnscaledOnOneParameterOnly(_Scaled):
    """All gradients but one are unscaled."""

    def reduce_gradients(self) -> None:
        self.divide(SCALE)
        kept = self.model.get_parameter("model.layers.1.mlp.up_proj.weight").grad
        if kept is not None:
            kept *= SCALE


class AccumulatedTwice(ReferenceTrainer):
    """Backward divides the loss by the micro-batches, as accelerate does, and it is a share already."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.plan.micro_batches)


class SkippedInSilence(ReferenceTrainer):
    """Every step is taken for one that overflowed, and nothing is said of it."""

    def optimizer_step(self) -> None:
        pass


class DecaysWhileSkipping(ReferenceTrainer):
    """A step that is skipped decays the weights all the same."""

    _has_skipped = False

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        skipped, self._has_skipped = not self._has_skipped, True
        self._num_steps -= skipped
        return replace(report, skipped=skipped)

    def optimizer_step(self) -> None:
        if self._has_skipped:
            super().optimizer_step()
            return
        with torch.no_grad():
            for parameter in self._trained():
                parameter.mul_(0.99)


class RowsSeeEachOther(ReferenceTrainer):
    """Rows are laid end to end without positions of their own: each sees the rows before it."""

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        rows = [
            {name: one[name][row][one["attention_mask"][row] != 0] for name in one}
            for one in own
            for row in range(len(one["input_ids"]))
        ]
        for row in rows:
            row["labels"][0] = IGNORED
        names = ("input_ids", "labels", "attention_mask")
        packed = {name: torch.cat([row[name] for row in rows])[None] for name in names}
        return super().train_on([packed], num_tokens)
