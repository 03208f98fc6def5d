"""Faults of trainers that promise, under `--mixed-precision`, to keep in float32 what they train.

The trainer without them, which computes in autocast, is right.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.devices.run_string import parse_run
from assay.training.protocol import MicroBatch, StepReport
from assay.training.trainers.reference import ReferenceTrainer


class NoMasterWeights(ReferenceTrainer):
    """The model is loaded in bfloat16 and trained as it is: small updates are rounded away."""

    def parameter_dtype(self) -> str:
        return parse_run(self.plan.run).dtype


class OneLayerCast(ReferenceTrainer):
    """One layer's weights are cast with the model's buffers."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        model.get_submodule("model.layers.2.mlp").to(torch.bfloat16)
        return super().build_optimizer(model)


class WeightsRoundedAfterEachStep(ReferenceTrainer):
    """What the model is served with is written back over the weights that are trained."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        _round(self.model)


class WeightsRoundedBeforeEachStep(ReferenceTrainer):
    """As WeightsRoundedAfterEachStep, where no update shows it."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        _round(self.model)
        return super().step(batch)


class SecondMomentRounded(ReferenceTrainer):
    """A fused step keeps the second moment in the dtype of what is computed."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for moments in self.optimizer.state.values():
            moments["exp_avg_sq"].copy_(moments["exp_avg_sq"].bfloat16())


class SumsRoundedToBfloat16(ReferenceTrainer):
    """Gradients are added up in a buffer of 16 bits."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())


class SumOfOneWeightRounded(ReferenceTrainer):
    """One gradient is added up in a buffer of 16 bits."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        gradient: Any = self.model.get_parameter("model.layers.1.mlp.up_proj.weight").grad
        gradient.copy_(gradient.bfloat16())


@torch.no_grad()
def _round(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
