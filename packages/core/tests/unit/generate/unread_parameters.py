"""A module whose code reads some of its parameters only on occasion, in a file that does not name the others."""

import torch
from torch import Tensor, nn


class Embeddings(nn.Module):
    """Mask and scale are for arguments, noise is for training, far and bare are for long texts, the last for nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        vectors = (nn.Parameter(torch.ones(1)) for _ in range(6))
        self.mask, self.scale, self.noise, self.far, self.bare, self.spare = vectors

    def forward(
        self, ids: Tensor, masked: Tensor | None = None, factor: float | None = None
    ) -> Tensor:
        hidden: Tensor = self.inner(ids)
        if ids.shape[1] > 1000:
            hidden = hidden + self.far
        if masked is None and ids.shape[1] > 1000:
            hidden = hidden + self.bare
        if factor is None or not factor:
            hidden = hidden.contiguous()
        else:
            hidden *= self.scale
            hidden *= factor
        if masked is not None:
            hidden = torch.where(masked[..., None], self.mask, hidden)
        return hidden + self.noise if self.training else hidden


class Experts(Embeddings):
    """Builds or looks up the names of its parts."""

    kind: str
    experts: nn.ModuleDict

    def forward(
        self, ids: Tensor, masked: Tensor | None = None, factor: float | None = None
    ) -> Tensor:
        hidden = super().forward(ids, masked, factor)
        if ids.shape[1] > 1000:
            hidden = getattr(self, f"scale_{self.kind}") * self.experts[self.kind](hidden)
        return hidden
