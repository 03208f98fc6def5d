"""DistributedDataParallel: every rank has the whole model."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from assay.training.protocol import TrainerTraits
from assay.training.trainers.reference import ReferenceTrainer


class DDPTrainer(ReferenceTrainer):
    """Gradients are added up in buckets while the last micro-batch's backward runs."""

    _replica: nn.Module

    @property
    def traits(self) -> TrainerTraits:
        """The reduction is done when `reduce_gradients` is called."""
        if self.data.size == 1:
            return super().traits
        reason = "DistributedDataParallel adds gradients up inside of backward"
        return replace(super().traits, invisible_phases={"reduce": reason})

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model itself: what wraps it is called instead, and holds no name of its own."""
        if self.data.size == 1:
            self._replica = model
            return model
        replica = DistributedDataParallel(model, process_group=self.data.group)
        replica.register_comm_hook(self.data.group, add_up)
        self._replica = replica
        return model

    @property
    def network(self) -> nn.Module:
        """The wrapper."""
        return self._replica

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        """Around each micro-batch: gradients are reduced after the last one only."""
        if num_left and isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Leave the gradients as they are: backward has reduced them."""

    def teardown(self) -> None:
        """Let go of the wrapper too."""
        del self._replica
        super().teardown()


def add_up(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Sums of gradients: losses are shares of the step's mean already, there is none to take."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(_first)
    return future


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
