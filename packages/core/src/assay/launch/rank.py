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
    """One process of a world; the process group is that of `torch.distributed`.

    number: of this rank in the world; local: of this rank on its machine; size: of the world.
    axes: sizes of the mesh axes by name.
    device: opened; of several accelerators the one of this rank.
    mesh: over all ranks, with `axes`.
    progress: shown, for the first rank, where that of the world is.
    """

    number: int
    local: int
    size: int
    axes: Mapping[str, int]
    device: "Device"
    mesh: "DeviceMesh"
    progress: Progress = field(default_factory=SilentProgress)
