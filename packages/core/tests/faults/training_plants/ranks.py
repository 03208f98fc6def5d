"""Trainers with one fault each that shows on several ranks only."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.training.batches import count_label_tokens
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.parallel import DDPTrainer, PipelineTrainer
from assay.training.trainers.reference import ReferenceTrainer

NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"


class AllRanksSeededAlike(ReferenceTrainer):
    """Every data rank drops by the same random numbers as the first."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self.device.seed(plan.seed)


class NothingReduced(ReferenceTrainer):
    """Every rank goes its own way."""

    def reduce_gradients(self) -> None:
        pass


class NormNotReduced(ReferenceTrainer):
    """Megatron-LM#1446: gradients of norms are left out of the reduction."""

    def reduce_gradients(self) -> None:
        own = self.model.get_parameter(NORM).grad
        assert own is not None
        kept = own.clone()
        super().reduce_gradients()
        own.copy_(kept)


class MeanOverRanks(ReferenceTrainer):
    """The gradients of ranks are averaged, and their losses are shares of one mean already."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.data.size


class FirstRankForAll(ReferenceTrainer):
    """One parameter is broadcast instead of summed."""

    def reduce_gradients(self) -> None:
        own = self.model.get_parameter(GATE).grad
        assert own is not None
        mine = own.clone()
        super().reduce_gradients()
        dist.broadcast(mine, 0)
        own.copy_(mine)


class LocalTokenCount(ReferenceTrainer):
    """Megatron-LM#7452: each rank divides by the tokens of its own micro-batches."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        own = self.data.size * count_label_tokens(micro_batch)
        return super().compute_loss(micro_batch, own)


class SameMicroBatchOnAllRanks(ReferenceTrainer):
    """The sampler does not know its rank."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        half = batch[: len(batch) // self.data.size]
        return super().step([one for one in half for _ in range(self.data.size)])


class RankLearnsFaster(ReferenceTrainer):
    """One rank has another learning rate."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        if self.rank == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 1.5
        return optimizer


class RankLoadsOtherMoments(ReferenceTrainer):
    """One rank does not load its moments: the ranks drift apart after a resume."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        if self.rank != 1:
            super().load_optimizer(state)


class MeanOfBuckets(DDPTrainer):
    """DistributedDataParallel as it comes: it averages."""

    def distribute(self, model: nn.Module) -> nn.Module:
        replica = nn.parallel.DistributedDataParallel(model, process_group=self.data.group)
        self._replica = replica
        return model


class RouterStaysLocal(DDPTrainer):
    """Megatron-LM#599: one parameter is not synchronised."""

    def distribute(self, model: nn.Module) -> nn.Module:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [GATE]
        )
        return super().distribute(model)


class AdapterOfOneStageScaled(PipelineTrainer):
    """The last stage's adapters count for a tenth more."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        for module in model.modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict) and self.stages.index == self.stages.size - 1:
                scaling["default"] *= 1.1
        return model
