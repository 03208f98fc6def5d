"""Where plain tensors enter and leave the ranks of one mesh axis, with gradients to match.

Each function is a DTensor made from this rank's tensor, redistributed, and made plain again. A
tensor that is *whole* is the same on all ranks, and so is its gradient; a *part* is this rank's
shard of one dim, with just that part of the gradient; of *summands* the ranks' sum is meant.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from assay.parallel.tensor_parallel.division import divide_evenly


def sum_gradients(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """`whole` itself; its gradient is the sum of what each rank gives for it."""
    entered = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return entered.to_local(grad_placements=[Partial()])


def sum_over_ranks(summand: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole of which every rank has a summand."""
    entered = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
    return entered.redistribute(placements=[Replicate()]).to_local()


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """The whole, which has `size` along `dim`, from each rank's part."""
    shape = list(part.shape)
    shape[dim] = size
    stride = torch.empty(shape, device="meta").stride()
    entered = DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(dim % part.dim())],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    return entered.redistribute(placements=[Replicate()]).to_local()


def shard_tensor(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """`whole`, which every rank has, as a DTensor of which each keeps its part along `dim` only."""
    rank = mesh.get_local_rank()
    (chunk,) = divide_evenly(whole.shape[dim], mesh.size()).parts[rank]
    # A copy: a view would keep the whole tensor's memory.
    part = (
        whole.detach()
        .narrow(dim, chunk.start, len(chunk))
        .clone(memory_format=torch.contiguous_format)
    )
    return DTensor.from_local(
        part,
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
