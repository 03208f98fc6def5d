"""Faults that need several ranks, each beside the same code without it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.parallel import FSDPTrainer, TensorParallelTrainer
from assay.training.trainers.reference import ReferenceTrainer

EXPERTS = "model.layers.1.mlp.experts.down_proj"


class SharedFrequencies(ReferenceTrainer):
    """No fault: ranks get the rotary frequencies of the first one."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        rotary: Any = model.get_submodule("model.rotary_emb")
        received = rotary.inv_freq.clone()
        dist.broadcast(received, 0)
        if self.rank:
            rotary.inv_freq = self.receive(received)
        return model

    def receive(self, frequencies: Tensor) -> Tensor:
        return frequencies


class BytesReadAsBfloat16(SharedFrequencies):
    """SkyRL#1709: the bytes of float32 arrive in a buffer of bfloat16."""

    def receive(self, frequencies: Tensor) -> Tensor:
        return frequencies.view(torch.bfloat16)[: len(frequencies)].to(frequencies.dtype)


class InBuckets(ReferenceTrainer):
    """No fault: gradients are laid end to end in buckets, which are reduced one by one.

    A bucket is here the gradients of two parameters.
    """

    def reduce_gradients(self) -> None:
        trained = self._trained()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for number, start in enumerate(range(0, len(trained), 2)):
            bucket = self.order(trained[start : start + 2])
            flat = torch.cat([_grad(p).flatten() for p in bucket])
            reduced = self.reduce(number, flat)
            for parameter, part in zip(
                bucket, reduced.split([p.numel() for p in bucket]), strict=True
            ):
                _grad(parameter).copy_(part.view_as(parameter))

    def order(self, bucket: list[nn.Parameter]) -> list[nn.Parameter]:
        return bucket

    def reduce(self, number: int, flat: Tensor) -> Tensor:
        del number
        return self.data.sum(flat)


class OrderDiffersByRank(InBuckets):
    """DeepSpeed#2343: ranks fill their buckets in the order in which their gradients come."""

    def order(self, bucket: list[nn.Parameter]) -> list[nn.Parameter]:
        return bucket[::-1] if self.rank else bucket


class BufferUsedAgain(InBuckets):
    """DeepSpeed#7965: one bucket of twenty is overwritten by the next before it was read."""

    _last: Tensor | None = None

    def reduce(self, number: int, flat: Tensor) -> Tensor:
        reduced = super().reduce(number, flat)
        last, self._last = self._last, reduced.clone()
        if number % 20 == 3 and last is not None:
            return last.repeat(-(-len(flat) // len(last)))[: len(flat)]
        return reduced


class SomeTransfersLost(InBuckets):
    """pytorch#84803: the result of every hundredth transfer between devices is zeros."""

    _number = 0

    def reduce(self, number: int, flat: Tensor) -> Tensor:
        self._number += 1
        reduced = super().reduce(number, flat)
        return torch.zeros_like(reduced) if self._number % 20 == 7 else reduced


class BucketNeverReady(InBuckets):
    """pytorch#128949: a bucket with an unused parameter is never ready, and not reduced."""

    def reduce(self, number: int, flat: Tensor) -> Tensor:
        if number == 3 and self._num_steps == 0:
            return flat
        return super().reduce(number, flat)


class TiedWeight(ReferenceTrainer):
    """No fault: what head and embedding add to the gradient of their one weight is both reduced."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        self._of_head: Tensor | None = None
        head = model.lm_head

        def forward(x: Tensor) -> Tensor:
            weight = head.weight.view_as(head.weight)
            if weight.requires_grad:
                weight.register_hook(self._keep)
            return torch.nn.functional.linear(x, weight)

        head.forward = forward
        return model  # type: ignore[no-any-return]

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        self._of_head = None
        return super().train_on(own, num_tokens)

    def reduce_gradients(self) -> None:
        tied: Any = self.model.get_submodule("model.embed_tokens")
        assert self._of_head is not None
        head = self._of_head.double()
        embedding = _grad(tied.weight).double() - head
        super().reduce_gradients()
        _grad(tied.weight).copy_(self.put_together(embedding, self.data.sum(head)))

    def put_together(self, embedding: Tensor, head: Tensor) -> Tensor:
        """Of this rank's gradient of the embedding and the reduced one of the head."""
        return self.data.sum(embedding.clone()) + head

    def _keep(self, gradient: Tensor) -> None:
        wide = gradient.float()
        self._of_head = wide if self._of_head is None else self._of_head + wide


class OnlyOneCopyReduced(TiedWeight):
    """Megatron-LM#844: a reduced copy is added to one that is not."""

    def put_together(self, embedding: Tensor, head: Tensor) -> Tensor:
        return embedding + head


class NormOverExperts(ReferenceTrainer):
    """No fault: each rank has the norm of its half of the experts, and of all that is shared."""

    def clip_gradients(self, max_norm: float) -> float:
        shared, experts = torch.zeros(()).double(), torch.zeros(()).double()
        for name, parameter in self.model.named_parameters():
            square = _grad(parameter).double().square()
            if ".experts." in name:
                half = square.chunk(self.data.size)[self.data.index]
                experts += half.sum()
            else:
                shared += square.sum()
        norm = (shared + self.over_ranks(experts)).sqrt()
        for parameter in self._trained():
            _grad(parameter).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def over_ranks(self, square: Tensor) -> Tensor:
        return self.data.sum(square)


class NormOverOwnExperts(NormOverExperts):
    """Automodel#3817: what other ranks have of the experts does not count."""

    def over_ranks(self, square: Tensor) -> Tensor:
        return square


class NormOverShards(FSDPTrainer):
    """No fault: squares of shards are added up over the ranks that have the others."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients = [_local(parameter.grad) for parameter in self._trained()]
        square = torch.stack([g.double().square().sum() for g in gradients]).sum()
        norm = self.over_ranks(square).sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return self.reported(norm, square)

    def over_ranks(self, square: Tensor) -> Tensor:
        return self.data.sum(square.clone())

    def reported(self, norm: Tensor, own_square: Tensor) -> float:
        del own_square
        return float(norm)


class NormOverReplicas(NormOverShards):
    """VeOmni#184: squares are added up over ranks that have the same, too."""

    def over_ranks(self, square: Tensor) -> Tensor:
        return 2 * super().over_ranks(square)


class NormOfShardReported(NormOverShards):
    """miles_diffusion#35: clipping is right, what is logged is the norm of the rank's own shards."""

    def reported(self, norm: Tensor, own_square: Tensor) -> float:
        del norm
        return float(own_square.sqrt())


class ClippedOnAllRanks(TensorParallelTrainer):
    """No fault."""

    def clip_gradients(self, max_norm: float) -> float:
        kept = [_local(parameter.grad).clone() for parameter in self._trained()]
        norm = super().clip_gradients(max_norm)
        if not self.is_clipped():
            for parameter, gradient in zip(self._trained(), kept, strict=True):
                _local(parameter.grad).copy_(gradient)
        return norm

    def is_clipped(self) -> bool:
        return True


class ClippedOnFirstRank(ClippedOnAllRanks):
    """DeepSpeed#1801: of the ranks of tensor parallelism the first one clips."""

    def is_clipped(self) -> bool:
        return self.rank == 0


class ByRank(ReferenceTrainer):
    """No fault: each rank's loader yields the micro-batches of its own."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        chosen = [batch[self.number(place)] for place in range(len(batch))]
        return super().step(chosen)

    def number(self, place: int) -> int:
        """Of the micro-batch that stands at `place`, which are the ranks' in turn."""
        return place


class SameOnEachRank(ByRank):
    """datasets#5360: the stream is not split by rank, each trains on the same."""

    def number(self, place: int) -> int:
        return place // self.data.size


class ExpertOfEveryMicroBatch(ReferenceTrainer):
    """No fault: the gradient of an expert is reduced whichever micro-batch used it."""

    def reduce_gradients(self) -> None:
        gradient = _grad(self.model.get_parameter(EXPERTS))
        own = gradient.clone()
        super().reduce_gradients()
        if not self.is_synchronised():
            gradient[3] = own[3]

    def is_synchronised(self) -> bool:
        return True


class ExpertNotInLastMicroBatch(ExpertOfEveryMicroBatch):
    """pytorch#69031: what the last micro-batch does not use is not reduced."""

    def is_synchronised(self) -> bool:
        return False


def _grad(parameter: nn.Parameter) -> Any:
    assert parameter.grad is not None
    return parameter.grad


def _local(gradient: Any) -> Any:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
