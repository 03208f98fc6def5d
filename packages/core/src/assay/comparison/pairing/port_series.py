"""The ports of a dump with their tensors in all passes, pairs of them, and values of a few of their tokens.

Shape legend: R tokens, C channels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.comparison.pairing.passes import Pass, PassPair, take_rows
from assay.dumps.protocol import Dump, DumpedTensor
from assay.judge.levels import LEVEL_OF_PHASE
from assay.sites import Phase

# Names of modules that choose the experts of a token.
ROUTERS = ("gate", "router")
# A repeated block such as `model.layers.3`, but not an expert in it. The group is its list.
BLOCK = re.compile(r"((?:[^.\d][^.]*\.)*)\d+")


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one module in one phase, over all passes of a dump."""

    module: str
    name: str
    phase: Phase = "forward"

    def __str__(self) -> str:
        """Return the name for messages and `--allow-unmatched`."""
        phase = "" if self.phase == "forward" else f" ({self.phase})"
        return f"{self.module or '(model)'}:{self.name}{phase}"

    @property
    def is_of_parameter(self) -> bool:
        """Return True for a parameter, its gradient, its update and its optimizer state."""
        return self.direction == "parameter" or self.phase in ("reduce", "clip", "optimizer")

    @property
    def is_positional(self) -> bool:
        """Return True for an argument without a name."""
        return self.direction == "input" and self.name.rpartition(".")[2].isdigit()

    @property
    def direction(self) -> str:
        """Return the first word of the name: input, output, parameter or op."""
        return self.name.partition(".")[0]

    @property
    def level(self) -> str:
        """Return the level of a verdict to which the port belongs."""
        if self.phase != "forward":
            return LEVEL_OF_PHASE[self.phase]
        if self.direction == "parameter":
            return "weights"
        if self.direction == "op":
            return "operations"
        is_head = self.module.rpartition(".")[2] == "lm_head" and self.direction == "output"
        return "logits" if is_head or self.name.endswith("logits") else "modules"


@dataclass(slots=True)
class Series:
    """All tensors at one port."""

    port: Port
    class_name: str
    order: int
    tensors: dict[tuple[int, int, int], list[DumpedTensor]] = field(default_factory=dict)
    """The tensors of all ranks, lowest rank first, by batch, step and call."""

    @property
    def first(self) -> DumpedTensor:
        """Return the tensor of the first pass and lowest rank."""
        return next(iter(self.tensors.values()))[0]

    def held_in(self, of_pass: Pass) -> list[DumpedTensor]:
        """Return the tensors of all ranks in the first call of a pass; none if it made no call."""
        return self.tensors.get((of_pass.batch, of_pass.step, 0), [])


SeriesByPort = dict[Port, Series]


def collect_series(dump: Dump, rank: int | None = None) -> SeriesByPort:
    """Group the tensors of a dump by port, in the order in which calls first finished.

    rank: the only rank to include; None for all.
    """
    series_of: SeriesByPort = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        if rank is not None and at.rank != rank:
            continue
        port = Port(at.module, tensor.site.port, at.phase)
        series = series_of.setdefault(port, Series(port, tensor.class_name, tensor.order))
        series.tensors.setdefault((at.micro_batch, at.step, at.call), []).append(tensor)
    for series in series_of.values():
        for tensors in series.tensors.values():
            tensors.sort(key=lambda one: one.site.at.rank)
    return series_of


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the last dim of an activation, or of the rows of a parameter."""

    start: int
    length: int
    groups: int = 1
    """Number of equal groups, such as heads. Each group holds a slice of every fused part."""
    head: tuple[int, int] = (1, 1)
    """Rows and columns as which the channels of each head are transposed, see `find_rotary_layouts`."""

    def of(self, value: Tensor, *, is_parameter: bool) -> Tensor:
        """Cut this part out of a tensor."""
        dim = 0 if is_parameter else value.ndim - 1
        groups: Tensor = value.unflatten(dim, (self.groups, -1))
        start, length = self.start // self.groups, self.length // self.groups
        part = groups.narrow(dim + 1, start, length).flatten(dim, dim + 1)
        heads: Tensor = part.unflatten(dim, (-1, *self.head))
        return heads.transpose(dim + 1, dim + 2).flatten(dim, dim + 2)


@dataclass(frozen=True, slots=True, eq=False)
class SeriesPair:
    """An expected series and its partner. A span is the part of a fused side that corresponds to the other."""

    expected: Series
    actual: Series
    expected_span: Span | None = None
    actual_span: Span | None = None
    is_guess: bool = False
    """True if kind, order or values pair the modules, not their names and classes."""

    @property
    def port(self) -> Port:
        """Return the port to report: the port of the narrower series."""
        return self.actual.port if self.expected_span is not None else self.expected.port


def without_numbers(name: str) -> str:
    """Return a name that is the same in all blocks."""
    return re.sub(r"\d+", "*", name)


def read_shared(tensors: Sequence[DumpedTensor]) -> Tensor | None:
    """Return the values that all ranks hold; None if they differ, or if one cannot be read."""
    first, *others = [one.read_intact() for one in tensors] or [None]
    if first is None or any(one is None or not torch.equal(one, first) for one in others):
        return None
    return first


def list_repeats(series: Series) -> list[tuple[int, int, int]]:
    """Return the calls that repeat the values of the first call in their pass."""
    found = []
    for key, tensors in series.tensors.items():
        first = series.tensors.get((*key[:2], 0), [])
        pairs = zip(first, tensors, strict=False)
        if key[2] and first and all(read_shared(pair) is not None for pair in pairs):
            found.append(key)
    return found


# Results of the same module differ by less than half of their norm, results of different modules by more
# than their norm.
SIMILAR = 0.5
# Number of values of each port.
_NUM_VALUES = 1 << 13


@dataclass(frozen=True, slots=True)
class Graph:
    """The ports of a dump, and the tokens whose values are compared."""

    series_of: SeriesByPort
    of_pass: Pass
    rows: Tensor | None
    """Flat numbers of the tokens in the pass; None if unknown."""
    _samples: dict[Port, Tensor | None] = field(default_factory=dict)

    def sample(self, series: Series) -> Tensor | None:
        """Return the values of the last tokens, (R, C), NaN for tokens that the series lacks.

        Returns: None for integers, and if the dump lacks the values.
        """
        if series.port not in self._samples:
            self._samples[series.port] = self._read(series)
        return self._samples[series.port]

    def _read(self, series: Series) -> Tensor | None:
        tensors = series.held_in(self.of_pass)
        value = tensors[0].read_intact() if tensors else None
        if value is None or not value.is_floating_point() or not value.numel() or not value.ndim:
            return None
        taken = None
        if series.port.is_of_parameter:  # outputs of a projection are the rows of its weight
            value = value.reshape(len(value), -1).t()
        else:
            taken = take_rows(value, self.of_pass, self.rows)
        if taken is None:
            flat = value.reshape(-1, value.shape[-1])
        else:
            flat = taken[0].flatten(1).masked_fill(~taken[1][:, None], math.nan)
        return flat[-max(1, _NUM_VALUES // flat.shape[1]) :].float()

    def inputs_of(self, module: str) -> list[Series]:
        """Return the floating-point arguments of a module."""
        return [
            series
            for port, series in self.series_of.items()
            if (port.module, port.phase, port.direction) == (module, "forward", "input")
            and is_activation(series)
        ]


def is_activation(series: Series) -> bool:
    """Return True for a floating-point tensor that has a width and is not a mask."""
    is_mask = series.port.name.endswith("mask")
    return "float" in series.first.dtype and bool(series.first.shape) and not is_mask


def open_graphs(
    series_of: tuple[SeriesByPort, SeriesByPort], passes: PassPair
) -> tuple[Graph, Graph]:
    """Return the graphs of both dumps, with the tokens of a pair of passes."""
    pair = passes.by_row()
    return (
        Graph(series_of[0], pair.expected, pair.expected_rows),
        Graph(series_of[1], pair.actual, pair.actual_rows),
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


def sample_error(pair: SeriesPair, graphs: tuple[Graph, Graph]) -> float:
    """Return the relative error of the sampled values of a pair."""
    sides = (pair.expected, pair.expected_span), (pair.actual, pair.actual_span)
    expected, actual = (
        span.of(value, is_parameter=False) if span is not None and value is not None else value
        for graph, (series, span) in zip(graphs, sides, strict=True)
        for value in [graph.sample(series)]
    )
    return relative_error(actual, expected)
