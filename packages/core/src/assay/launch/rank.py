"""What a body knows of the world that it runs in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from assay.devices.base import Device


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a world; the process group is that of `torch.distributed`.

    number: of this rank in the world. local: among the ranks of this machine.
    device: opened; of accelerators the one that belongs to this rank.
    mesh: over all ranks, with the world's axes.
    """

    number: int
    local: int
    size: int
    axes: Mapping[str, int]
    device: "Device"
    mesh: "DeviceMesh"
