"""Pairs of tensors, as a comparison shows them to an observer."""

from collections.abc import Callable
from dataclasses import dataclass

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


Observer = Callable[[TensorPair], None]


def observe_with(*observers: Observer) -> Observer:
    """Return an observer that shows a pair to several others."""

    def observe(pair: TensorPair) -> None:
        for one in observers:
            one(pair)

    return observe


def observe_nothing(pair: TensorPair) -> None:
    """Ignore a pair."""
