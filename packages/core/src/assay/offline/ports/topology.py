"""Matching of modules with unrelated names by order, kind, width and values.

It serves to compare graphs of accelerator libraries (`1_Attention.0_LinearOperation`) with PyTorch modules.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from assay.dumps.protocol import Dump
from assay.offline.ports.lanes import Lane, Lanes
from assay.offline.tokens.passes import Pass

# Words in class names by kind of operation.
_KINDS = {
    "norm": r"norm",
    "embedding": r"embed|gather",
    "attention": r"attention|attn",
    "linear": r"linear|proj|matmul|lmhead|lm_head|dense",
    "activation": r"act|silu|gelu|swish|swiglu|relu",
}
# The largest alignment table: 4,000 modules on each side.
_MOST_PAIRS = 16_000_000

# This many values of each result are compared. Results of the same module differ by less than half of their
# norm, results of different modules by more than their norm.
_NUM_VALUES = 4096
_SIMILAR = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A module with results that contains no other such module."""

    name: str
    kind: str
    width: int
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Graph:
    """The ports of a dump, and the pass whose values are compared."""

    lanes: Lanes
    dump: Dump
    of_pass: Pass

    def values(self, lane: Lane) -> Tensor | None:
        """Return the first values of a lane in the pass; None if the dump lacks them."""
        tensors = lane.held_in(self.of_pass)
        values = self.dump.read_intact(tensors[0]) if len(tensors) == 1 else None
        return None if values is None else values.flatten()[:_NUM_VALUES].double()


def match_by_topology(expected: Graph, actual: Graph) -> dict[str, str]:
    """Return the actual module of each expected one.

    Leaf modules are aligned in network order. Only modules of one kind and width pair, preferably with
    similar values. The partner of a container is the common parent of its leaves' partners.
    """
    one, other = _leaves(expected), _leaves(actual)
    if len(one) * len(other) > _MOST_PAIRS:
        return {}
    found = {a.name: b.name for a, b in _align(one, other)}
    return found | _match_containers(expected.lanes, found)


def _leaves(graph: Graph) -> list[_Node]:
    outputs: dict[str, Lane] = {}
    for lane in graph.lanes.values():
        if lane.port.phase == "forward" and lane.port.direction == "output":
            outputs.setdefault(lane.port.module, lane)
    names = set(outputs)
    parents = {".".join(n.split(".")[:depth]) for n in names for depth in range(n.count(".") + 1)}
    return [
        _Node(name, _kind_of(name, lane), lane.first.shape[-1], graph.values(lane))
        for name, lane in outputs.items()
        if name not in parents and lane.first.shape
    ]


def _kind_of(name: str, lane: Lane) -> str:
    # The class is more reliable than the last part of the path.
    for text in (lane.class_name, name.rpartition(".")[2]):
        for kind, words in _KINDS.items():
            if re.search(words, text.lower()):
                return kind
    return ""


def _align(expected: Sequence[_Node], actual: Sequence[_Node]) -> list[tuple[_Node, _Node]]:
    """Return the pairs of the best order-preserving alignment (Needleman-Wunsch without gap costs)."""
    best = [[0.0] * (len(actual) + 1) for _ in range(len(expected) + 1)]
    for i, one in enumerate(expected):
        row, above = best[i + 1], best[i]
        for j, other in enumerate(actual):
            row[j + 1] = max(above[j + 1], row[j], above[j] + _likeness(one, other))
    pairs = []
    i, j = len(expected), len(actual)
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((expected[i], actual[j]))
    return pairs[::-1]


def _likeness(one: _Node, other: _Node) -> float:
    """Return the score of a pair; 0 if it is impossible."""
    if one.kind != other.kind or one.width != other.width:
        return 0.0
    if one.values is None or other.values is None or one.values.shape != other.values.shape:
        return 1.0
    is_similar = (one.values - other.values).norm() <= _SIMILAR * one.values.norm()
    return 4.0 if bool(is_similar) else 1.0


def _match_containers(expected: Lanes, leaves: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    used = set(leaves.values())
    partners_of = {
        name: [there for here, there in leaves.items() if here.startswith(f"{name}.")]
        for name in {port.module for port in expected} - set(leaves)
    }
    # Outer containers first: a layer before its MLP.
    for name, partners in sorted(partners_of.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(partners) < 2:
            break
        parts = zip(*(partner.split(".") for partner in partners), strict=False)
        parent = ".".join(one for one, *_ in takewhile(lambda same: len({*same}) == 1, parts))
        if parent and parent not in used:
            found[name] = parent
            used.add(parent)
    return found
