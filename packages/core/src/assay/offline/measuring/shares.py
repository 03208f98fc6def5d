"""Pairs of ports, divided by bytes into shares that processes measure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from assay.dumps.protocol import DumpedTensor
from assay.offline.ports.lanes import LanePair

# A share of so many bytes takes a tenth of a second, about as long as starting a process.
_FEWEST_BYTES = 64 << 20
# Of about so many shares, the last ones end nearly together on 16 cores.
_NUM_SHARES = 128


@dataclass(frozen=True, slots=True)
class Share:
    """Consecutive pairs. num_bytes: of both sides, as far as the dumps state shapes."""

    pairs: Sequence[LanePair]
    num_bytes: int


def divide_pairs(pairs: Sequence[LanePair]) -> list[Share]:
    """Return consecutive shares of about equal size, in the same order.

    Two pairs at one port, whose sums are pooled, make all pairs one share.
    """
    if len({pair.port for pair in pairs}) < len(pairs):
        return [Share(pairs, sum(map(_count_bytes, pairs)))]
    least = max(_FEWEST_BYTES, sum(map(_count_bytes, pairs)) // _NUM_SHARES)
    shares: list[Share] = []
    waiting: list[LanePair] = []
    num_bytes = 0
    for pair in pairs:
        waiting.append(pair)
        num_bytes += _count_bytes(pair)
        if num_bytes >= least:
            shares.append(Share(waiting, num_bytes))
            waiting, num_bytes = [], 0
    return [*shares, Share(waiting, num_bytes)] if waiting else shares


def _count_bytes(pair: LanePair) -> int:
    return sum(_size_of(lane.tensors.values()) for lane in (pair.expected, pair.actual))


def _size_of(calls: Iterable[Sequence[DumpedTensor]]) -> int:
    return sum(
        math.prod(one.shape or ()) * getattr(torch, one.dtype or "float32", torch.float32).itemsize
        for tensors in calls
        for one in tensors
    )
