"""Values of a few tokens, which confirm or refute that two ports belong together.

Shape legend: R tokens, C channels.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from assay.dumps.protocol import Dump
from assay.offline.ports.lanes import Lane, LanePair, Lanes, Port
from assay.offline.tokens.passes import Pass, PassPair, take_rows

# Results of the same module differ by less than half of their norm, results of different modules by more
# than their norm.
SIMILAR = 0.5
# Number of values of each port.
_NUM_VALUES = 1 << 13


@dataclass(frozen=True, slots=True)
class Graph:
    """The ports of a dump, and the tokens whose values are compared."""

    lanes: Lanes
    dump: Dump
    of_pass: Pass
    rows: Tensor | None
    """Flat numbers of the tokens in the pass; None if unknown."""
    _samples: dict[Port, Tensor | None] = field(default_factory=dict)

    def sample(self, lane: Lane) -> Tensor | None:
        """Return the values of the last tokens, (R, C), NaN for tokens that the lane lacks.

        Returns: None for integers, and if the dump lacks the values.
        """
        if lane.port not in self._samples:
            self._samples[lane.port] = self._read(lane)
        return self._samples[lane.port]

    def _read(self, lane: Lane) -> Tensor | None:
        tensors = lane.held_in(self.of_pass)
        value = self.dump.read_intact(tensors[0]) if tensors else None
        if value is None or not value.is_floating_point() or not value.numel() or not value.ndim:
            return None
        taken = None
        if lane.port.is_of_parameter:  # outputs of a projection are the rows of its weight
            value = value.reshape(len(value), -1).t()
        else:
            taken = take_rows(value, self.of_pass, self.rows)
        if taken is None:
            flat = value.reshape(-1, value.shape[-1])
        else:
            flat = taken[0].flatten(1).masked_fill(~taken[1][:, None], math.nan)
        return flat[-max(1, _NUM_VALUES // flat.shape[1]) :].float()

    def inputs_of(self, module: str) -> list[Lane]:
        """Return the floating-point arguments of a module."""
        return [
            lane
            for port, lane in self.lanes.items()
            if (port.module, port.phase, port.direction) == (module, "forward", "input")
            and is_activation(lane)
        ]


def is_activation(lane: Lane) -> bool:
    """Return True for a floating-point tensor that has a width and is not a mask."""
    is_mask = lane.port.name.endswith("mask")
    return "float" in lane.first.dtype and bool(lane.first.shape) and not is_mask


def open_graphs(
    lanes: tuple[Lanes, Lanes], dumps: tuple[Dump, Dump], passes: PassPair
) -> tuple[Graph, Graph]:
    """Return the graphs of both dumps, with the tokens of a pair of passes."""
    pair = passes.by_row()
    return (
        Graph(lanes[0], dumps[0], pair.expected, pair.expected_rows),
        Graph(lanes[1], dumps[1], pair.actual, pair.actual_rows),
    )


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """Return the relative error over the tokens that both samples hold; inf without any."""
    if value is None or reference is None or value.shape[1] != reference.shape[1]:
        return math.inf
    num_rows = min(len(value), len(reference))
    value, reference = value[-num_rows:], reference[-num_rows:]
    kept = ~(value.isnan() | reference.isnan()).any(1)
    difference, norm = (float(one[kept].norm()) for one in (value - reference, reference))
    if not norm:
        return math.inf if difference or not bool(kept.any()) else 0.0
    return difference / norm


def sample_error(pair: LanePair, graphs: tuple[Graph, Graph]) -> float:
    """Return the relative error of the sampled values of a pair."""
    sides = (pair.expected, pair.expected_span), (pair.actual, pair.actual_span)
    expected, actual = (
        span.of(value, is_parameter=False) if span is not None and value is not None else value
        for graph, (lane, span) in zip(graphs, sides, strict=True)
        for value in [graph.sample(lane)]
    )
    return relative_error(actual, expected)
