"""Pairs of tensors, as a comparison shows them to an observer."""

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
    """The compared rows of actual and expected, (R, C); None for masks, and if there is a reason."""
    reason: str = ""
    """Reason why the pair was not compared; "" if it was."""


class Observer(Protocol):
    """Collects something of every pair. Processes measure parts of the pairs, each with its own."""

    def __call__(self, pair: TensorPair) -> None:
        """Look at one pair."""

    def renew(self) -> Self:
        """Return an observer with the same settings that has seen no pair."""

    def extend(self, later: Self) -> None:
        """Add what an observer of later pairs has collected."""
