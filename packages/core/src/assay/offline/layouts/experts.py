"""Global numbers for experts that every rank counts from 0."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.moving import move_all, move_tensor
from assay.offline.ports.lanes import ROUTERS

_EXPERT = re.compile(r"(.*\bexperts\.)([0-9]+)(\..*|)")
_AXES = ("moe_ep", "ep")


@dataclass(slots=True)
class _Experts:
    """The experts of one layer."""

    numbers: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the experts on each rank."""
    axes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index of each rank along the expert-parallel axis, and the size of the axis."""

    def offsets(self, num_routed: int) -> Mapping[int, int]:
        """Return the offset of each rank's numbers; empty if the numbers are global.

        num_routed: number of experts that the router chooses from; 0 if unknown.
        """
        own = next(iter(self.numbers.values()))
        if len(self.numbers) < 2 or any(other != own for other in self.numbers.values()):
            return {}
        if len(self.axes) == len(self.numbers):
            return {rank: place * len(own) for rank, (place, _) in self.axes.items()}
        if num_routed != len(own) * len(self.numbers):
            return {}
        return {rank: place * len(own) for place, rank in enumerate(sorted(self.numbers))}


def number_experts(dump: Dump) -> tuple[Dump, int]:
    """Assign global numbers to experts that each rank counts from 0.

    Either the dump declares the expert-parallel axis, or the router has as many scores as all ranks together
    have experts. With fewer scores, every rank holds a part of every expert.
    Returns: the dump, and the number of ranks that share the experts of a layer, or 0.
    """
    layers: dict[str, _Experts] = {}
    routed: dict[str, int] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        parent, _, name = at.module.rpartition(".")
        if found := _EXPERT.fullmatch(at.module):
            layer = layers.setdefault(found[1], _Experts())
            layer.numbers.setdefault(at.rank, set()).add(int(found[2]))
            axis = next((tensor.axes[one] for one in _AXES if one in tensor.axes), (0, 1))
            if axis[1] > 1:
                layer.axes[at.rank] = axis
        elif name in ROUTERS and tensor.site.port in ("output", "output.0") and tensor.shape:
            routed[f"{parent}.experts."] = tensor.shape[-1]
    offsets = {name: layer.offsets(routed.get(name, 0)) for name, layer in layers.items()}

    def move(tensor: DumpedTensor) -> DumpedTensor:
        found = _EXPERT.fullmatch(tensor.site.at.module)
        offset = offsets.get(found[1], {}).get(tensor.site.at.rank, 0) if found else 0
        if not found or not offset:
            return tensor
        return move_tensor(tensor, module=f"{found[1]}{int(found[2]) + offset}{found[3]}")

    shared = max((len(one) for one in offsets.values()), default=0)
    if not shared:
        return dump, 0
    return move_all(dump, ((tensor, move(tensor)) for tensor in dump.tensors)), shared
