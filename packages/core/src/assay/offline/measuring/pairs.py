"""Pairs of tensors, and observers that a comparison calls with them."""

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from assay.dumps.protocol import DumpedTensor
from assay.offline.ports.lanes import Port


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors at one port of the expected dump."""

    port: Port
    expected: DumpedTensor
    actual: DumpedTensor
    values: tuple[Tensor, Tensor] | None = None
    """Compared rows of actual and expected, (R, C); None for masks and pairs that were not compared."""
    reason: str = ""
    """The reason why the pair was not compared; "" if it was."""


class Observer(Protocol):
    """Collects facts on every pair. Each process that measures a share has its own observer."""

    def __call__(self, pair: TensorPair) -> None:
        """Observe one pair."""

    def renew(self) -> Self:
        """Return an empty observer with the same settings."""

    def extend(self, later: Self) -> None:
        """Add the results of an observer of later pairs."""
