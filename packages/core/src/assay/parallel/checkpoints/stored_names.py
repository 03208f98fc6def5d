"""Map parameters to stored tensors with other names.

Since version 5, transformers keeps the experts of Mixtral in two fused parameters, but still
stores one tensor for each expert and projection.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The stored tensors of one parameter."""

    rows: tuple[tuple[str, ...], ...]
    """Groups of names; the tensors of a group are concatenated along their first dim."""
    stacked: bool = False
    """True if the groups are stacked along a new first dim (experts); False for one group."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Return the names of all stored tensors, in order."""
        return tuple(name for row in self.rows for name in row)

    @property
    def is_plain(self) -> bool:
        """Return True if the parameter is one stored tensor, unchanged."""
        return not self.stacked and len(self.stored_names) == 1

    def shape(self, shapes: _Shapes) -> tuple[int, ...]:
        """Return the parameter's shape, from the stored `shapes`; (-1,) if groups differ in shape."""
        of_rows = {(sum(shapes[name][0] for name in row), *shapes[row[0]][1:]) for row in self.rows}
        if len(of_rows) != 1 or not shapes[self.rows[0][0]]:
            return (-1,)
        (of_row,) = of_rows
        return (len(self.rows), *of_row) if self.stacked else of_row

    def assemble(self, read: Callable[[str], Tensor]) -> Tensor:
        """Build the parameter; `read` returns a stored tensor by its name."""
        rows = [torch.cat([read(name) for name in row]) for row in self.rows]
        return torch.stack(rows) if self.stacked else rows[0]


def assembly_of(model_type: str, name: str, shapes: _Shapes) -> Assembly | None:
    """Find the stored tensors of parameter `name`; None if `shapes` lacks one."""
    if name in shapes:
        return Assembly(((name,),))
    return _assembly_of_mixtral(name, shapes) if model_type == "mixtral" else None


# The projections that Mixtral's own code calls w1 (gate), w2 (down) and w3 (up).
_EXPERT_WEIGHTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def _assembly_of_mixtral(name: str, shapes: _Shapes) -> Assembly | None:
    if router := re.fullmatch(r"(.*)\.mlp\.gate\.weight", name):
        stored = f"{router[1]}.block_sparse_moe.gate.weight"
        return Assembly(((stored,),)) if stored in shapes else None
    found = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
    if found is None:
        return None
    prefix = f"{found[1]}.block_sparse_moe.experts"
    experts = {
        int(match[1])
        for stored in shapes
        if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", stored))
    }
    rows = tuple(
        tuple(f"{prefix}.{expert}.{weight}.weight" for weight in _EXPERT_WEIGHTS[found[2]])
        for expert in range(max(experts, default=-1) + 1)
    )
    if not rows or any(stored not in shapes for row in rows for stored in row):
        return None
    return Assembly(rows, stacked=True)
