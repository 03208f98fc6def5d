"""Differentiable collectives over one mesh axis, from plain tensors to plain tensors.

Each makes a DTensor of this rank's tensor, redistributes it, and returns the local tensor. A
*whole* tensor and its gradient are the same on all ranks; a *part* is this rank's shard along one
dim; the ranks' *summands* add up to the whole tensor.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from assay.parallel.tensor_parallel.division import divide_evenly


def sum_gradients(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `whole`; sum the ranks' gradients in backward."""
    entered = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return entered.to_local(grad_placements=[Partial()])


def sum_over_ranks(summand: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of all ranks' summands, whole on every rank."""
    entered = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
    return entered.redistribute(placements=[Replicate()]).to_local()


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Gather the whole tensor, of length `size` along `dim`, from all ranks' parts."""
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
    """Shard `whole`, which every rank has, along `dim`, and keep memory only for the part."""
    rank = mesh.get_local_rank()
    (chunk,) = divide_evenly(whole.shape[dim], mesh.size()).parts[rank]
    # A copy, as a view would keep the whole tensor's memory.
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
