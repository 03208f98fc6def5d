"""Which parts of the whole tensors a rank has at the boundaries of sharded modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.parallel.tensor_parallel.division import Division
from assay.parallel.tensor_parallel.heads import HeadShare


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """This rank's features of a whole tensor.

    index: index of each local feature in the whole tensor, shape (local,).
    copies: number of copies of each over all ranks, shape (local,). The gradients of all copies of
        a feature add up to its gradient.
    dim: the dim of the features, counted from the end: -1, or -2 for heads.
    """

    index: Tensor
    copies: Tensor
    dim: int = -1

    @classmethod
    def of(cls, division: Division, rank: int, dim: int = -1) -> "Features":
        """The features that `division` gives to `rank`."""
        index = division.features_of(rank)
        copies = division.copies()
        return cls(torch.tensor(index), torch.tensor([copies[feature] for feature in index]), dim)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole value."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def cut_gradient(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole gradient, divided by the number of copies of each feature."""
        shape = [1] * whole.dim()
        shape[self.dim] = -1
        return self.cut(whole) / self.copies.to(whole.device).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """Which inputs and outputs of modules are parts of whole tensors on this rank.

    input_features, output_features: by the path of a module, the features of its first input and
        of its (first) output. Modules that are in neither have whole tensors there.
    heads: this rank's attention heads; the second output of attention modules, the probabilities,
        has its query heads.
    """

    heads: HeadShare
    input_features: Mapping[str, Features] = field(default_factory=dict)
    output_features: Mapping[str, Features] = field(default_factory=dict)
