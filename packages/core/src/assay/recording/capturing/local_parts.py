"""This rank's part of a DTensor, and its layout.

`assay.offline.layouts.placements` reads layouts: `d0[dp] d1[tp]` is a matrix with rows divided over
the mesh axis `dp`, and columns over `tp`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's part of a tensor."""

    value: Tensor
    layout: str = ""
    """Placement over ranks; "" for a plain tensor, and if no layout can express it."""
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By mesh axis, the index of this rank and the size of the axis."""
    is_whole: bool = True
    """True if every rank holds the same values."""
    problem: str = ""
    """The reason not to record the part; "" to record it."""


def take_local(value: Tensor) -> LocalPart:
    """Return this rank's part of a tensor, without autograd and communication.

    Waits for a pending collective that delivers the tensor.
    """
    if not dist.is_available() or not isinstance(value, DTensor):
        return LocalPart(_wait(value))
    with torch.no_grad():
        local = _wait(value.to_local())
    mesh, placements = value.device_mesh, value.placements
    is_whole = all(one.is_replicate() for one in placements)
    place = mesh.get_coordinate()
    if place is None:
        return LocalPart(local, is_whole=is_whole, problem="DTensors of a mesh without this rank")
    if others := [one for one in placements if one.is_partial() and one != Partial("sum")]:
        return LocalPart(
            local, is_whole=False, problem=f"DTensors whose parts do not add up: {others[0]}"
        )
    # Axes without names are told apart by the shape of their mesh.
    shape = "x".join(map(str, mesh.shape))
    names = mesh.mesh_dim_names or tuple(f"mesh-{shape}-{axis}" for axis in range(mesh.ndim))
    axes = dict(zip(names, zip(place, mesh.shape, strict=True), strict=True))
    divided = [_write_dim(dim, names, value) for dim in range(value.ndim)]
    layout = "" if None in divided else " ".join(map(str, divided))
    return LocalPart(local, layout, axes, is_whole)


def _wait(value: Tensor) -> Tensor:
    """Return the values without autograd, after a pending collective.

    Before it ends they have no memory to copy, and `detach` would hide it.
    """
    if dist.is_available() and isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    return value.detach()


def _write_dim(dim: int, names: Sequence[str], value: "DTensor") -> str | None:
    """Return the word of a dim in a layout; None if a rank holds several ranges of its indices."""
    axes: list[str] = []
    inner: list[str] = []
    # The last axis is the innermost one, except that FSDP divides shards of tensor parallelism.
    num_outer = 1
    for axis, placement in reversed([*enumerate(value.placements)]):
        if placement.is_partial():
            if dim == value.ndim - 1:
                axes.insert(0, f"{names[axis]}:partial")
        elif getattr(placement, "dim", None) == dim:
            split = getattr(placement, "split_factor", 1)
            if split > 1 and (inner or split != num_outer):
                return None
            (inner if split > 1 else axes).insert(0, names[axis])
            num_outer *= value.device_mesh.shape[axis]
    axes += inner
    return f"d{dim}[{','.join(axes)}]" if axes else f"d{dim}"
