"""DistributedDataParallel: every rank holds the whole model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from assay.training.trainers.reference import ReferenceTrainer


class DDPTrainer(ReferenceTrainer):
    """Reduces gradients in buckets while the backward pass of the last micro-batch runs."""

    reduced_in_backward_by = "DistributedDataParallel"
    _replica: nn.Module

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap the model, and return it without the wrapper, which adds a prefix to names."""
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
        """Return the context of a micro-batch: only the last one reduces gradients."""
        if num_left and isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return nullcontext()

    def teardown(self) -> None:
        """Release the wrapper too."""
        del self._replica
        super().teardown()


def add_up(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Sum gradients without averaging: losses are already shares of the step's mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
