"""Matching of modules with unrelated names by order, kind, width and values.

It serves to compare graphs of accelerator libraries (`1_Attention.0_LinearOperation`) with PyTorch modules.
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from assay.offline.ports.joined_results import block_number, pair_fused
from assay.offline.ports.lanes import Lane, Lanes
from assay.offline.ports.samples import SIMILAR, Graph, relative_error

# Words in class names by kind of operation.
_KINDS = {
    "norm": r"norm",
    "rotary": r"rotary|rope",
    "embedding": r"embed|gather",
    "attention": r"attention|attn",
    "linear": r"linear|proj|matmul|lmhead|lm_head|dense",
    "activation": r"act|silu|gelu|swish|swiglu|relu",
}
# The kind of modules that return their input, such as dropout in evaluation.
_IDENTITY = "identity"
# The score of a pair that is known.
_CERTAIN = 100.0
# The largest alignment table: 4,000 modules on each side.
_MOST_PAIRS = 16_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A module with results."""

    name: str
    class_name: str
    kind: str
    widths: tuple[int, ...]
    """Widths of its output and, if recorded, its input."""
    values: Tensor | None
    given: Tensor | None
    """Values of its input."""


def match_by_topology(
    expected: Graph, actual: Graph, names: Mapping[str, str], *, by_order: bool
) -> dict[str, str]:
    """Return the actual module of each expected one that `names` lacks.

    Modules are aligned in network order, those that contain others by themselves. Only modules of one kind
    and width with similar values pair; values alone decide on modules of unknown kind. The partner of any
    other container is the common parent of its children's partners.
    by_order: True to pair the rest by order, kind and width.
    """
    found: dict[str, str] = {}
    fused: dict[str, str] = {}
    # An alignment keeps the order. The next one pairs what the two sides call in another order.
    while more := _match(expected, actual, {**names, **found}, 0.0):
        found |= more
    if by_order:
        left = [
            [lane for port, lane in graph.lanes.items() if port.module not in known]
            for graph, known in (
                (expected, {*names, *found}),
                (actual, {*names.values(), *found.values()}),
            )
        ]
        fused = {
            pair.expected.port.module: pair.actual.port.module
            for pair in pair_fused((expected, actual), *left)
        }
        found |= _match(expected, actual, {**names, **found, **fused}, 1.0)
    found = {name: found[name] for name in found if name not in fused}
    return found | _match_containers(expected.lanes, {**names, **fused, **found})


def _match(
    expected: Graph, actual: Graph, names: Mapping[str, str], least: float
) -> dict[str, str]:
    """Align both graphs. Modules in `names` are left out, or keep the order if `least` is not 0.

    Of two modules with equal values, one may compute by itself what the other one leaves to modules in it.
    """
    found: dict[str, str] = {}
    for kinds in ((False, False), (True, True), (False, True), (True, False))[: 2 if least else 4]:
        partners = {**names, **found}
        known = ({*partners}, {*partners.values()}) if not least else (set[str](), set[str]())
        one, other = (
            _list_nodes(graph, without, is_container=is_container)
            for graph, without, is_container in zip((expected, actual), known, kinds, strict=True)
        )
        if len(one) * len(other) <= _MOST_PAIRS:
            found |= {a.name: b.name for a, b in _align(one, other, names, least)}
    return found


def _list_nodes(graph: Graph, known: AbstractSet[str], *, is_container: bool) -> list[_Node]:
    outputs: dict[str, Lane] = {}
    for lane in graph.lanes.values():
        if lane.port.phase == "forward" and lane.port.direction == "output":
            outputs.setdefault(lane.port.module, lane)
    names = set(outputs)
    parents = {".".join(n.split(".")[:depth]) for n in names for depth in range(n.count(".") + 1)}
    return [
        _node(graph, name, lane)
        for name, lane in outputs.items()
        if (name in parents) is is_container and name not in known and lane.first.shape and name
    ]


def _node(graph: Graph, name: str, lane: Lane) -> _Node:
    values, inputs = graph.sample(lane), graph.inputs_of(name)[:1]
    widths = tuple(one.first.shape[-1] for one in (lane, *inputs) if one.first.shape)
    given = graph.sample(inputs[0]) if inputs else None
    kind = _kind_of(name, lane)
    if values is not None and given is not None and torch.equal(values, given) and values.any():
        kind = _IDENTITY
    return _Node(name, lane.class_name, kind, widths, values, given)


def _kind_of(name: str, lane: Lane) -> str:
    # The class is more reliable than the last part of the path.
    for text in (lane.class_name, name.rpartition(".")[2]):
        for kind, words in _KINDS.items():
            if re.search(words, text.lower()):
                return kind
    return ""


def _align(
    expected: Sequence[_Node], actual: Sequence[_Node], names: Mapping[str, str], least: float
) -> list[tuple[_Node, _Node]]:
    """Return the pairs of the best order-preserving alignment (Needleman-Wunsch without gap costs)."""
    used = set(names.values())

    def score(one: _Node, other: _Node) -> float:
        if one.name in names or other.name in used:
            return _CERTAIN if names.get(one.name) == other.name else 0.0
        return _likeness(one, other, least)

    best = [[0.0] * (len(actual) + 1) for _ in range(len(expected) + 1)]
    for i, one in enumerate(expected):
        row, above = best[i + 1], best[i]
        for j, other in enumerate(actual):
            row[j + 1] = max(above[j + 1], row[j], above[j] + score(one, other))
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


def _likeness(one: _Node, other: _Node, least: float) -> float:
    """Return the score of a pair; 0 if it is impossible, `least` if only kind and width speak for it."""
    if any(a != b for a, b in zip(one.widths, other.widths, strict=False)):
        return 0.0
    if one.kind != other.kind and _IDENTITY in (one.kind, other.kind):
        return 0.0
    is_kind = one.kind == other.kind and one.kind not in ("", "rotary", _IDENTITY)
    errors = [relative_error(other.values, one.values)]
    if one.given is not None and other.given is not None:
        errors.append(relative_error(other.given, one.given))
    limit = SIMILAR if is_kind else SIMILAR / 5
    if max(errors) > limit:
        return least if is_kind else 0.0
    is_same = one.class_name == other.class_name, block_number(one.name) == block_number(other.name)
    return 3.0 + is_kind + sum(is_same) / 2 - max(errors)


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
