"""A rank's parts of whole tensors at the boundaries of sharded modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.parallel.tensor_parallel.division import Division
from assay.parallel.tensor_parallel.heads import HeadShare


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
        shape = [1] * whole.dim()
        shape[self.dim] = -1
        return self.cut(whole) / self.copies.to(whole.device).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """This rank's features at module boundaries; modules without an entry have whole tensors."""

    heads: HeadShare
    """The attention probabilities, second output of an attention module, have its query heads."""
    input_features: Mapping[str, Features] = field(default_factory=dict)
    """Features of the first input, by module path."""
    output_features: Mapping[str, Features] = field(default_factory=dict)
    """Features of the (first) output, by module path."""
