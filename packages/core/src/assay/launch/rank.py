"""The first argument of a body: its rank in the world."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from assay.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from assay.devices.base import Device


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a world, with the default process group of `torch.distributed`."""

    number: int
    local: int
    """Number of this rank on its machine."""
    size: int
    """Number of ranks."""
    axes: Mapping[str, int]
    """Sizes of the mesh axes by name."""
    device: "Device"
    mesh: "DeviceMesh"
    progress: Progress = field(default_factory=SilentProgress)
    """On rank 0, the display of the world."""
