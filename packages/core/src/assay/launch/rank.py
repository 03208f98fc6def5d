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

    number: this rank in the world. local: this rank on its machine. size: number of ranks.
    axes: sizes of the mesh axes by name.
    device: the opened device of this rank.
    mesh: the mesh over all ranks, with `axes`.
    progress: the display of the world for the first rank.
    """

    number: int
    local: int
    size: int
    axes: Mapping[str, int]
    device: "Device"
    mesh: "DeviceMesh"
    progress: Progress = field(default_factory=SilentProgress)
