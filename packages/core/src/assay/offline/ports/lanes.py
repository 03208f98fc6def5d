"""The ports of a dump with their tensors in all passes (lanes), and pairs of lanes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.comparing.levels import LEVEL_OF_PHASE
from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.tokens.passes import Pass
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
class Lane:
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


Lanes = dict[Port, Lane]


def collect_lanes(dump: Dump, rank: int | None = None) -> Lanes:
    """Group the tensors of a dump by port, in the order in which calls first finished.

    rank: the only rank to include; None for all.
    """
    lanes: Lanes = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        if rank is not None and at.rank != rank:
            continue
        port = Port(at.module, tensor.site.port, at.phase)
        lane = lanes.setdefault(port, Lane(port, tensor.class_name, tensor.order))
        lane.tensors.setdefault((at.micro_batch, at.step, at.call), []).append(tensor)
    for lane in lanes.values():
        for tensors in lane.tensors.values():
            tensors.sort(key=lambda one: one.site.at.rank)
    return lanes


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
class LanePair:
    """An expected lane and its partner. A span is the part of a fused side that corresponds to the other."""

    expected: Lane
    actual: Lane
    expected_span: Span | None = None
    actual_span: Span | None = None
    is_guess: bool = False
    """True if kind, order or values pair the modules, not their names and classes."""

    @property
    def port(self) -> Port:
        """Return the port to report: the port of the narrower lane."""
        return self.actual.port if self.expected_span is not None else self.expected.port


def without_numbers(name: str) -> str:
    """Return a name that is the same in all blocks."""
    return re.sub(r"\d+", "*", name)


def read_shared(dump: Dump, tensors: Sequence[DumpedTensor]) -> Tensor | None:
    """Return the values that all ranks hold; None if they differ, or if one cannot be read."""
    first, *others = map(dump.read_intact, tensors) if tensors else [None]
    if first is None or any(one is None or not torch.equal(one, first) for one in others):
        return None
    return first


def list_repeats(dump: Dump, lane: Lane) -> list[tuple[int, int, int]]:
    """Return the calls that repeat the values of the first call in their pass."""
    found = []
    for key, tensors in lane.tensors.items():
        first = lane.tensors.get((*key[:2], 0), [])
        pairs = zip(first, tensors, strict=False)
        if key[2] and first and all(read_shared(dump, pair) is not None for pair in pairs):
            found.append(key)
    return found
