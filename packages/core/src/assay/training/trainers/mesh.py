"""The device mesh of a trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from assay.errors import UsageError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    """None without a mesh."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str) -> "MeshAxis":
        """Return the axis `name` of `mesh`, or an axis of size 1 if the mesh lacks it."""
        if mesh is None or name not in (mesh.mesh_dim_names or ()):
            return cls()
        return cls(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum `value` over the ranks of the axis, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value


def open_mesh(axes: Mapping[str, int], torch_device: str) -> DeviceMesh | None:
    """Open the mesh over all ranks; return None for a single process.

    Raises: UsageError if the number of ranks is another one.
    """
    num_ranks = prod(axes.values())
    if num_ranks == 1:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != num_ranks:
        mesh = ",".join(f"{name}={size}" for name, size in axes.items())
        raise UsageError(
            f"a mesh of {mesh} has {num_ranks} ranks, and this world {world_size}:"
            " start it by `assay check train --mesh`, by assay.launch, or by torchrun"
        )
    kind = torch.device(torch_device).type
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
