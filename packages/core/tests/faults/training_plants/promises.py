"""Faults of trainers that promise, under `--mixed-precision`, to keep in float32 what they train."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.devices.run_string import parse_run
from assay.training.batches import MicroBatch
from assay.training.protocol import StepReport
from assay.training.trainers.reference import ReferenceTrainer


class _ComputesInAutocast(ReferenceTrainer):
    """Right: parameters, sums of gradients and moments in float32, products in the run's dtype."""

    features = ReferenceTrainer.features | {"mixed-precision"}

    def parameter_dtype(self) -> str:
        return "float32"

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        dtype = getattr(torch, parse_run(self.plan.run).dtype)
        with torch.autocast(self.device.torch_device, dtype):
            return super().compute_loss(micro_batch, num_step_tokens)


class NoMasterWeights(_ComputesInAutocast):
    """The model is loaded in bfloat16 and trained as it is: small updates are rounded away."""

    def parameter_dtype(self) -> str:
        return parse_run(self.plan.run).dtype


class OneLayerCast(_ComputesInAutocast):
    """One layer's weights are cast with the model's buffers."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        model.get_submodule("model.layers.2.mlp").to(torch.bfloat16)
        return super().build_optimizer(model)


class WeightsRoundedAfterEachStep(_ComputesInAutocast):
    """What the model is served with is written back over the weights that are trained."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        _round(self.model)


class WeightsRoundedBeforeEachStep(_ComputesInAutocast):
    """As WeightsRoundedAfterEachStep, where no update shows it."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        _round(self.model)
        return super().step(batch)


class SecondMomentRounded(_ComputesInAutocast):
    """A fused step keeps the second moment in the dtype of what is computed."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for moments in self.optimizer.state.values():
            moments["exp_avg_sq"].copy_(moments["exp_avg_sq"].bfloat16())


class SumsRoundedToBfloat16(_ComputesInAutocast):
    """Gradients are added up in a buffer of 16 bits."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())


class SumOfOneWeightRounded(_ComputesInAutocast):
    """One gradient is added up in a buffer of 16 bits."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        gradient: Any = self.model.get_parameter("model.layers.1.mlp.up_proj.weight").grad
        gradient.copy_(gradient.bfloat16())


@torch.no_grad()
def _round(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
