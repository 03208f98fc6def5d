"""Convert between a rank's tensors at module boundaries and whole tensors."""

import torch
import torch.distributed as dist
from torch import Tensor

from assay.parallel.tensor_parallel.layout import Features, TensorLayout
from assay.sites import unwrapped_path


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
        features = self._features(module, port)
        if features is None or local.ndim != len(shape) or local.ndim < -features.dim:
            return False
        expected = list(shape)
        expected[features.dim] = len(features.index)
        return list(local.shape) == expected

    def whole(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Gather all ranks' features; copies are averaged."""
        features = self._known(module, port)
        copies = features.copies.to(local.device)
        view = [1] * local.ndim
        view[features.dim] = -1
        return self._add_up(features, local.double() / copies.view(view), shape).to(local.dtype)

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Gather all ranks' features; copies are summed."""
        return self._add_up(self._known(module, port), local.double(), shape)

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
            if port.startswith("changed.") and port.endswith((".keys", ".values")):
                return self._cache
        return self._outputs.get(module)

    def _known(self, module: str, port: str) -> Features:
        features = self._features(module, port)
        if features is None:
            raise LookupError(f"{module}:{port} is not divided")
        return features

    def _add_up(self, features: Features, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        total = local.new_zeros(shape)
        total.index_add_(total.ndim + features.dim, features.index.to(local.device), local)
        dist.all_reduce(total, group=self._group)
        return total


def _cached_heads(layout: TensorLayout, group: dist.ProcessGroup) -> Features:
    """Return the features of cached keys and values, (B, heads, T, head_dim)."""
    of_ranks: list[tuple[int, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, layout.heads.kv_heads, group)
    slots = [head for of_rank in of_ranks for head in of_rank]
    heads = layout.heads.kv_heads
    copies = torch.tensor([slots.count(head) for head in heads])
    return Features(torch.tensor(heads), copies, dim=-3)
