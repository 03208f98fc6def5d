"""A rank's parts of whole tensors at module boundaries, and their conversion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from assay.parallel.division import Division, HeadShare
from assay.sites import LocalPart, holds_heads, unwrapped_path


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """This rank's features of a whole tensor."""

    index: Tensor
    """Index of each local feature in the whole tensor, shape (local,)."""
    copies: Tensor
    """Number of copies of each over all ranks, shape (local,). The gradients of all copies of a feature
    add up to its gradient."""
    dim: int = -1
    """The dim of the features, counted from the end: -1, or -2 for heads."""

    @classmethod
    def of(cls, division: Division, rank: int, dim: int = -1) -> "Features":
        """Return the features of `rank` in `division`."""
        index = division.features_of(rank)
        copies = division.copies()
        return cls(torch.tensor(index), torch.tensor([copies[feature] for feature in index]), dim)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole value."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def cut_gradient(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole gradient, divided by the copies of each feature."""
        return self.divide_by_copies(self.cut(whole))

    def spread(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` with this rank's part in its place, and zeros elsewhere."""
        total = local.new_zeros(shape)
        return total.index_add_(total.ndim + self.dim, self.index.to(local.device), local)

    def divide_by_copies(self, local: Tensor) -> Tensor:
        """Divide each feature of this rank by the number of its copies."""
        shape = [1] * local.ndim
        shape[self.dim] = -1
        return local / self.copies.to(local.device).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """This rank's features at module boundaries; modules without an entry have whole tensors."""

    heads: HeadShare
    """The attention probabilities, second output of an attention module, have its query heads."""
    input_features: dict[str, Features] = field(default_factory=dict)
    """Features of the first input, by module path."""
    output_features: dict[str, Features] = field(default_factory=dict)
    """Features of the (first) output, by module path."""


class RankBoundaries:
    """The RankLayout of a tensor-parallel group."""

    def __init__(self, layout: TensorLayout, group: dist.ProcessGroup) -> None:
        self._group = group
        heads = torch.tensor(layout.heads.query_heads)
        self._probabilities = Features(heads, torch.ones_like(heads), dim=-3)
        self._cache = _cached_heads(layout, group)
        self._inputs = {unwrapped_path(path): f for path, f in layout.input_features.items()}
        self._outputs = {unwrapped_path(path): f for path, f in layout.output_features.items()}

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if the rank's features explain the difference in shape."""
        features = self._features(module, port) if local.is_floating_point() else None
        if features is None or local.ndim != len(shape) or local.ndim < -features.dim:
            return False
        expected = list(shape)
        expected[features.dim] = len(features.index)
        return list(local.shape) == expected

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        """Gather all ranks' features; copies are averaged."""
        spread = []
        for module, port, local, shape in parts:
            features = self._known(module, port)
            spread.append(features.spread(features.divide_by_copies(local.double()), shape))
        totals = torch.cat([tensor.flatten() for tensor in spread])
        dist.all_reduce(totals, group=self._group)
        wholes = totals.split([math.prod(part.shape) for part in parts])
        return [
            whole.view(part.shape).to(part.local.dtype)
            for whole, part in zip(wholes, parts, strict=True)
        ]

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Gather all ranks' features; copies are summed."""
        total = self._known(module, port).spread(local.double(), shape)
        dist.all_reduce(total, group=self._group)
        return total

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's features."""
        return self._known(module, port).cut(whole)

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's features, divided by their copies."""
        return self._known(module, port).cut_gradient(whole)

    def _features(self, module: str, port: str) -> Features | None:
        if port.startswith("input."):
            return self._inputs.get(module)
        if module.endswith(".self_attn"):
            if port == "output.1":
                return self._probabilities
            if holds_heads(port):
                return self._cache
        return self._outputs.get(module)

    def _known(self, module: str, port: str) -> Features:
        features = self._features(module, port)
        if features is None:
            raise LookupError(f"{module}:{port} is not divided")
        return features


def _cached_heads(layout: TensorLayout, group: dist.ProcessGroup) -> Features:
    """Return the features of cached keys and values, (B, heads, T, head_dim)."""
    of_ranks: list[tuple[int, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, layout.heads.kv_heads, group)
    slots = [head for of_rank in of_ranks for head in of_rank]
    heads = layout.heads.kv_heads
    copies = torch.tensor([slots.count(head) for head in heads])
    return Features(torch.tensor(heads), copies, dim=-3)
