"""What each rank's tensors are of the whole ones, at the boundaries of divided modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.parallel.tensor_parallel.division import Division
from assay.parallel.tensor_parallel.heads import HeadShare


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """This rank's features of a whole tensor.

    index: the whole tensor's index of each of them, shape (local,).
    copies: how many times the ranks hold each of them, shape (local,). Where it is above 1, each
        place has a part of the feature's gradient: all of them add up to it.
    dim: the dim of the features, from the end: -1, or -2 for heads.
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
        """A gradient for this rank's part, such that all ranks together have the whole one."""
        shape = [1] * whole.dim()
        shape[self.dim] = -1
        return self.cut(whole) / self.copies.to(whole.device).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """Where in a model this rank's plain tensors are parts of whole ones.

    input_features, output_features: by the path of a module, what its first input and its (first)
        output hold. A module that is in neither has whole tensors there.
    heads: this rank's attention heads; the attention modules' second output, the probabilities,
        has its query heads.
    """

    heads: HeadShare
    input_features: Mapping[str, Features] = field(default_factory=dict)
    output_features: Mapping[str, Features] = field(default_factory=dict)
