"""The mesh of a trainer, as one of its ranks sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from assay.errors import UsageError


class MeshError(UsageError):
    """A mesh that cannot be made here."""

    @classmethod
    def no_world(cls, mesh: Mapping[str, int]) -> "MeshError":
        """This process is not one of so many ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return cls(
            f"a mesh of {_written(mesh)} has {prod(mesh.values())} ranks, and this world {ranks}:"
            " start it by `assay check train --mesh`, by assay.launch, or by torchrun"
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: how many ranks it has, which of them this is, and how they talk.

    group: None where there is no mesh.
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str) -> "Axis":
        """The axis `name` of `mesh`; one rank where it has none."""
        if mesh is None or name not in (mesh.mesh_dim_names or ()):
            return cls()
        return cls(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Add `value` up over the ranks of the axis, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value


def open_mesh(axes: Mapping[str, int], torch_device: str) -> DeviceMesh | None:
    """The mesh over all ranks of this world; None for a single process.

    Raises: MeshError if the world has not as many ranks.
    """
    if prod(axes.values()) == 1:
        return None
    if not dist.is_initialized() or dist.get_world_size() != prod(axes.values()):
        raise MeshError.no_world(axes)
    kind = torch.device(torch_device).type
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _written(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())
