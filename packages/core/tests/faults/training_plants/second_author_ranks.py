"""Faults by another author than the rules: each needs several ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from assay.parallel.pipeline import cut_stage
from assay.parallel.tensor_parallel import part_of, sum_over_ranks
from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.parallel import (
    DDPTrainer,
    FSDPTrainer,
    PipelineTrainer,
    TensorParallelTrainer,
)
from assay.training.trainers.reference import ReferenceTrainer


class BucketLeftOut(ReferenceTrainer):
    """The last bucket is never flushed: one layer's gradients stay local."""

    def reduce_gradients(self) -> None:
        layer = self.model.get_submodule("model.layers.3")
        kept = {p: p.grad.clone() for p in layer.parameters() if p.grad is not None}
        super().reduce_gradients()
        for parameter, own in kept.items():
            parameter.grad = own


class ReducedTwice(ReferenceTrainer):
    """A wrapper reduces, and the training loop does so again."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        super().reduce_gradients()


class ReducedInBfloat16(ReferenceTrainer):
    """Gradients of a float32 run are added up in 8 bits."""

    def reduce_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(self.data.sum(parameter.grad.bfloat16()))


class AccumulatesWithoutNoSync(DDPTrainer):
    """Each micro-batch is reduced: what was reduced before is added up once more."""

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        del num_left
        return nullcontext()


class PromptLearnedOnRankOne(ReferenceTrainer):
    """Ranks with different versions of the collator: one does not mask the prompt."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        if self.rank == 1:
            shown = micro_batch["attention_mask"] == 1
            labels = torch.where(shown, micro_batch["input_ids"], IGNORED)
            assert not torch.equal(labels, micro_batch["labels"])
            micro_batch = {**micro_batch, "labels": labels}
        return super().compute_loss(micro_batch, num_step_tokens)


class RankOneStartsElsewhere(ReferenceTrainer):
    """One weight is initialised by each rank for itself."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        if self.rank == 1:
            with torch.no_grad():
                model.get_parameter("model.layers.2.mlp.gate_proj.weight").mul_(1.05)
        return model


class BuffersDiffer(ReferenceTrainer):
    """One rank has the rotary frequencies of another theta."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        if self.rank == 1:
            rotary: Any = model.get_submodule("model.rotary_emb")
            rotary.inv_freq = rotary.inv_freq**1.1
        return model


class OneWeightDriftsOnRankOne(ReferenceTrainer):
    """After each step the least possible change of one weight, on one rank."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        if self.rank == 1:
            with torch.no_grad():
                weight = self.model.get_parameter("model.layers.0.mlp.up_proj.weight")
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
        return report


class AveragesShards(FSDPTrainer):
    """FSDP2 as it comes: it divides by the number of ranks."""

    def distribute(self, model: nn.Module) -> nn.Module:
        sharded = super().distribute(model)
        for unit in _units(sharded):
            unit.set_gradient_divide_factor(float(self.data.size))
        return sharded


class UnitNotSynchronised(FSDPTrainer):
    """One layer stays in the mode of accumulation."""

    def distribute(self, model: nn.Module) -> nn.Module:
        sharded = super().distribute(model)
        layer: Any = sharded.get_submodule("model.layers.1")
        layer.set_requires_gradient_sync(False)
        return sharded


class ShardsReducedInBfloat16(FSDPTrainer):
    """A policy of mixed precision reduces a float32 run in 8 bits."""

    def distribute(self, model: nn.Module) -> nn.Module:
        assert self.mesh is not None
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        body: Any = model
        for layer in body.model.layers:
            fully_shard(layer, mesh=self.mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=self.mesh["dp"], mp_policy=policy)
        for unit in _units(model):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return model


class ClippedByOwnShards(FSDPTrainer):
    """DeepSpeed#8469: each rank clips by the norm of what it holds."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)


class _ChangedTensorParallel(TensorParallelTrainer):
    def distribute(self, model: nn.Module) -> nn.Module:
        distribute = super().distribute(model)
        self.change(distribute)
        return distribute

    def change(self, model: Any) -> None:
        raise NotImplementedError


class OutputNotSummed(_ChangedTensorParallel):
    """No all-reduce after o_proj."""

    def change(self, model: Any) -> None:
        o_proj = model.model.layers[1].self_attn.o_proj
        o_proj.forward = lambda x: functional.linear(x, part_of(o_proj.weight, None, 1))


class DownSummedTwice(_ChangedTensorParallel):
    """The all-reduce is in the layer, and in the block around it."""

    def change(self, model: Any) -> None:
        down = model.model.layers[2].mlp.down_proj
        _change_results(down, lambda x: sum_over_ranks(x, down.mesh))


class ColumnInputNotSummed(_ChangedTensorParallel):
    """The gradient of a column-parallel layer's input is this rank's share alone."""

    def change(self, model: Any) -> None:
        up = model.model.layers[1].mlp.up_proj
        up.forward = lambda x: functional.linear(x, part_of(up.weight, up.ranges, 0))


class NormSummedTwice(_ChangedTensorParallel):
    """The whole gradient of a norm is treated as a part and added up over tp."""

    def change(self, model: Any) -> None:
        norm = model.model.layers[1].input_layernorm
        norm.weight.register_hook(self._sum)

    def _sum(self, gradient: Tensor) -> Tensor:
        assert self.mesh is not None
        total = gradient.clone()
        dist.all_reduce(total, group=self.mesh["tp"].get_group())
        return total


class EmbeddingStopsEarly(_ChangedTensorParallel):
    """The bound of a rank's rows is wrong: the rows of its last tokens are zeros."""

    def change(self, model: Any) -> None:
        embedding = model.model.embed_tokens
        forward = embedding.forward

        def change(ids: Tensor) -> Tensor:
            lost = (ids >= ord("x")) & (ids < 130)
            return forward(ids).masked_fill(lost[..., None], 0)  # type: ignore[no-any-return]

        embedding.forward = change


class KeyHeadsExchanged(_ChangedTensorParallel):
    """Each rank has the key head of the other one."""

    def change(self, model: Any) -> None:
        keys = model.model.layers[1].self_attn.k_proj
        other = 1 - keys.mesh.get_local_rank()
        assert keys.out_features == 48
        keys.ranges = (range(24 * other, 24 * other + 24),)


class QueryHeadsDealtInTurn(_ChangedTensorParallel):
    """Rank 0 has the even query heads, rank 1 the odd ones; o_proj has its rows in blocks."""

    def change(self, model: Any) -> None:
        queries = model.model.layers[2].self_attn.q_proj
        rank = queries.mesh.get_local_rank()
        starts = (24 * rank, 24 * (rank + 2))
        queries.ranges = tuple(range(start, start + 24) for start in starts)


class LogitsGatheredInOtherOrder(_ChangedTensorParallel):
    """The vocabulary of rank 1 comes before that of rank 0."""

    def change(self, model: Any) -> None:
        _change_results(model.lm_head, lambda x: x.roll(130, -1))


class WholeParametersCountTwice(TensorParallelTrainer):
    """The norm adds up over tp what every rank has whole."""

    def clip_gradients(self, max_norm: float) -> float:
        assert self.mesh is not None
        gradients = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        square = torch.stack([g.float().square().sum() for g in gradients]).sum()
        dist.all_reduce(square, group=self.mesh["tp"].get_group())
        for gradient in gradients:
            gradient.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
        return float(square.sqrt())


class LayersExchangedBetweenStages(PipelineTrainer):
    """Two stages have each other's layer next to their boundary."""

    def _load_stage(self, plan: TrainingPlan) -> nn.Module:
        whole: Any = self.load_pretrained(plan.model)
        layers = whole.model.layers
        layers[1], layers[2] = layers[2], layers[1]
        return cut_stage(whole, self.stages.size, self.stages.index)


class LayerRunTwice(PipelineTrainer):
    """The layer at the boundary is run by both stages."""

    def _load_stage(self, plan: TrainingPlan) -> nn.Module:
        stage: Any = super()._load_stage(plan)
        if self.stages.index == 1:
            layer = getattr(stage.model.layers, "2")
            forward = layer.forward
            layer.forward = lambda x, *args, **kwargs: forward(
                forward(x, *args, **kwargs), *args, **kwargs
            )
        return stage  # type: ignore[no-any-return]


class LayerLost(PipelineTrainer):
    """The last layer of the first stage is on no rank."""

    def _load_stage(self, plan: TrainingPlan) -> nn.Module:
        stage: Any = super()._load_stage(plan)
        if self.stages.index == 0:
            del stage.model.layers[-1]
            stage.model.config.num_hidden_layers -= 1
        return stage  # type: ignore[no-any-return]


class _ChangedStage(PipelineTrainer):
    """`number` is the stage that is changed."""

    number = 0

    def _load_stage(self, plan: TrainingPlan) -> nn.Module:
        stage = super()._load_stage(plan)
        if self.stages.index == self.number:
            self.change(stage)
        return stage

    def change(self, stage: Any) -> None:
        raise NotImplementedError


class HiddenStatesSentInBfloat16(_ChangedStage):
    """What travels between the stages of a float32 run is rounded to 8 bits."""

    def change(self, stage: Any) -> None:
        _change_results(stage, lambda x: x.bfloat16().to(x.dtype))


class GradientOfFirstMicroBatchLost(_ChangedStage):
    """The second stage's answer to the first micro-batch of a step comes too late."""

    calls = 0

    def change(self, stage: Any) -> None:
        def drop(hidden: Tensor) -> Tensor:
            self.calls += 1
            if self.calls % 2 == 1:
                hidden = hidden + 0
                hidden.register_hook(torch.zeros_like)
            return hidden

        _change_results(stage, drop)


class MaskOfOtherRows(_ChangedStage):
    """The second stage is given the mask of the rows in another order."""

    number = 1

    def change(self, stage: Any) -> None:
        forward = stage.forward
        stage.forward = lambda hidden, attention_mask: forward(
            hidden, attention_mask=attention_mask.flip(0)
        )


class ScheduleScalesGradients(PipelineTrainer):
    """torch.distributed.pipelining as it comes: it divides by the number of micro-batches."""

    def run_schedule(self, batch: Sequence[MicroBatch], num_tokens: int) -> float:
        loss = super().run_schedule(batch, num_tokens)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(batch)
        return loss


class ClippedByStage(PipelineTrainer):
    """Each stage clips by its own norm."""

    def clip_gradients(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._trained(), max_norm))


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _local(gradient: Any) -> Any:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _change_results(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    original = module.forward
    module.forward = lambda *args, **kwargs: change(original(*args, **kwargs))
