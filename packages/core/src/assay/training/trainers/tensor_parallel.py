"""Tensor parallelism: divides heads, features and vocabulary over the ranks of `tp`."""

from dataclasses import replace

from torch import nn

from assay.parallel.rank_boundaries import RankBoundaries
from assay.parallel.tensor_parallel import apply_tensor_parallel
from assay.training.protocol import TrainerTraits
from assay.training.trainers.dropout import require_no_dropout
from assay.training.trainers.fsdp import FSDPTrainer


class TensorParallelTrainer(FSDPTrainer):
    """Divides the model over `tp`, and shards it by FSDP2 over `dp`."""

    features = frozenset({"lora", "recompute", "cpu-offload", "mixed-precision"})
    axes = frozenset({"dp", "tp"})

    _layout: RankBoundaries | None = None

    @property
    def traits(self) -> TrainerTraits:
        """Declares the layout of tensors over the ranks of tp too."""
        return replace(super().traits, layout=self._layout)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Divide the model, then shard the part of each rank."""
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
