"""Tensor parallelism: heads, features and vocabulary are divided over the ranks of `tp`."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.parallel.tensor_parallel.decoder import apply_tensor_parallel
from assay.parallel.tensor_parallel.layout import Features, TensorLayout
from assay.sites import unwrapped_path
from assay.training.protocol import TrainerTraits
from assay.training.trainers.dropout import require_no_dropout
from assay.training.trainers.fsdp import FSDPTrainer


class TensorParallelTrainer(FSDPTrainer):
    """Divided over `tp`, and sharded by FSDP2 over `dp` where that has several ranks."""

    features = frozenset({"lora", "recompute", "cpu-offload", "mixed-precision"})
    axes = frozenset({"dp", "tp"})

    _layout: "RankBoundaries | None" = None

    @property
    def traits(self) -> TrainerTraits:
        """Those of FSDP, and which parts of whole tensors the ranks of tp have."""
        return replace(super().traits, layout=self._layout)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Divide the model, then shard what each rank has."""
        if self.mesh is None:
            return model
        if "tp" in (self.mesh.mesh_dim_names or ()):
            require_no_dropout(
                model,
                "ranks of tp draw masks of dropout that no single process draws; train without, or"
                " on dp",
            )
            mesh = self.mesh["tp"]
            self._layout = RankBoundaries(apply_tensor_parallel(model, mesh), mesh.get_group())
        return super().distribute(model) if self.data.size > 1 else model


class RankBoundaries:
    """Of what whole tensors the ranks of a tensor-parallel group hold parts: a RankLayout."""

    def __init__(self, layout: TensorLayout, group: dist.ProcessGroup) -> None:
        self._group = group
        heads = torch.tensor(layout.heads.query_heads)
        self._probabilities = Features(heads, torch.ones_like(heads), dim=-3)
        self._inputs = {unwrapped_path(path): f for path, f in layout.input_features.items()}
        self._outputs = {unwrapped_path(path): f for path, f in layout.output_features.items()}

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether the features that the rank has there make up the difference in shape."""
        features = self._features(module, port)
        if features is None or local.ndim != len(shape) or local.ndim < -features.dim:
            return False
        expected = list(shape)
        expected[features.dim] = len(features.index)
        return list(local.shape) == expected

    def whole(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Every rank's features at their places; where several have one, their mean."""
        features = self._known(module, port)
        copies = features.copies.to(local.device)
        view = [1] * local.ndim
        view[features.dim] = -1
        return self._add_up(features, local.double() / copies.view(view), shape).to(local.dtype)

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Every rank's features at their places; where several have one, their sum."""
        return self._add_up(self._known(module, port), local.double(), shape)

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """This rank's features."""
        return self._known(module, port).cut(whole)

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """This rank's features, shared where several ranks have one."""
        return self._known(module, port).cut_gradient(whole)

    def _features(self, module: str, port: str) -> Features | None:
        if port.startswith("input."):
            return self._inputs.get(module)
        if port == "output.1" and module.endswith(".self_attn"):
            return self._probabilities
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
