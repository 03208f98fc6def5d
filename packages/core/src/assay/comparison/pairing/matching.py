"""Matching of the modules and ports of two dumps: by name, and by order, kind, width and values."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

import torch
from torch import Tensor

from assay.comparison.pairing.fused_projections import block_number, find_rotary_layouts, pair_fused
from assay.comparison.pairing.port_series import (
    SIMILAR,
    Graph,
    Series,
    SeriesByPort,
    SeriesPair,
    is_activation,
    relative_error,
)
from assay.sites import Phase, strip_model_prefixes

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
            [series for port, series in graph.series_of.items() if port.module not in known]
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
    return found | _match_containers(expected.series_of, {**names, **fused, **found})


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
    outputs: dict[str, Series] = {}
    for series in graph.series_of.values():
        if series.port.phase == "forward" and series.port.direction == "output":
            outputs.setdefault(series.port.module, series)
    names = set(outputs)
    parents = {".".join(n.split(".")[:depth]) for n in names for depth in range(n.count(".") + 1)}
    return [
        _node(graph, name, series)
        for name, series in outputs.items()
        if (name in parents) is is_container and name not in known and series.first.shape and name
    ]


def _node(graph: Graph, name: str, series: Series) -> _Node:
    values, inputs = graph.sample(series), graph.inputs_of(name)[:1]
    widths = tuple(one.first.shape[-1] for one in (series, *inputs) if one.first.shape)
    given = graph.sample(inputs[0]) if inputs else None
    kind = _kind_of(name, series)
    if values is not None and given is not None and torch.equal(values, given) and values.any():
        kind = _IDENTITY
    return _Node(name, series.class_name, kind, widths, values, given)


def _kind_of(name: str, series: Series) -> str:
    # The class is more reliable than the last part of the path.
    for text in (series.class_name, name.rpartition(".")[2]):
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


def _match_containers(expected: SeriesByPort, leaves: Mapping[str, str]) -> dict[str, str]:
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


_NUM_NEAREST = 3


@dataclass(slots=True)
class Matching:
    """Matched and unmatched ports of two dumps."""

    pairs: list[SeriesPair]
    """Pairs in the expected order."""
    absent_masks: list[Series]
    """Expected masks of modules that ACTUAL called without a mask."""
    extra_masks: list[Series]
    """Masks of ACTUAL, of modules that EXPECTED called without a mask."""
    unmatched_expected: list[str]
    unmatched_actual: list[str]
    rotated: list[str] = field(default_factory=list)
    """Modules whose heads are reordered, see `find_rotary_layouts`."""


def match_series(
    expected: SeriesByPort,
    actual: SeriesByPort,
    partner_of: Mapping[str, str] | None = None,
    guesses: Collection[str] = (),
    graphs: tuple[Graph, Graph] | None = None,
) -> Matching:
    """Match the ports of two dumps.

    partner_of: the actual module of each expected one; None to match names.
    guesses: expected modules whose names do not determine their partner.
    graphs: the values that confirm fused projections; None to pair none.
    """
    if partner_of is None:
        partner_of = match_modules(expected, actual, {})
    groups_of_expected, groups_of_actual = _group(expected), _group(actual)
    pairs: list[SeriesPair] = []
    for (module, phase), all_series in groups_of_expected.items():
        partner = partner_of.get(module)
        candidates = groups_of_actual.get((partner, phase), []) if partner is not None else []
        pairs += [
            SeriesPair(one, other, is_guess=module in guesses or _differ_in_class(one, other))
            for one, other in _match_ports(all_series, candidates)
        ]
    pairs += _match_root_inputs(pairs, expected, actual)
    if not any(pair.port.level == "logits" for pair in pairs):
        pairs += _match_logits(*_without_partner(pairs, expected, actual))
    rotated: list[str] = []
    if graphs is not None:
        pairs += pair_fused(graphs, *_without_partner(pairs, expected, actual))
        pairs, rotated = find_rotary_layouts(pairs, graphs)
    pairs.sort(key=lambda pair: pair.expected.order)
    left_expected, left_actual = _without_partner(pairs, expected, actual)
    names_left = [str(one.port) for one in left_actual]
    called = {one.actual.port.module for one in pairs if one.port.direction == "input"}
    masks = [
        one
        for one in left_expected
        if one.port.name.endswith("mask") and partner_of.get(one.port.module) in called
    ]
    extra = [one for one in left_actual if one.port.name.endswith("mask")]
    left_expected = [one for one in left_expected if one not in masks]
    return Matching(
        pairs,
        masks,
        [one for one in extra if one.port.direction == "input" and one.port.module in called],
        [_with_nearest(str(one.port), names_left) for one in left_expected],
        names_left,
        rotated,
    )


def _differ_in_class(one: Series, other: Series) -> bool:
    return "" not in (one.class_name, other.class_name) and one.class_name != other.class_name


def _match_logits(expected: Sequence[Series], actual: Sequence[Series]) -> list[SeriesPair]:
    """Match logits with the last result of their width, where the head has another name.

    Called if no logits have a partner: a model returns the logits of its head, and other results may be
    as wide as the vocabulary.
    """
    found = []
    for series in expected:
        results = [
            one
            for one in actual
            if one.port.direction == "output" and one.port.phase == "forward"
            and one.first.shape and one.first.shape[-1:] == (series.first.shape or ())[-1:]
        ]  # fmt: skip
        if series.port.level == "logits" and results:
            found.append(SeriesPair(series, results[-1], is_guess=True))
    return found


def _without_partner(
    pairs: Iterable[SeriesPair], expected: SeriesByPort, actual: SeriesByPort
) -> tuple[list[Series], list[Series]]:
    used = {id(series) for pair in pairs for series in (pair.expected, pair.actual)}
    return (
        [series for series in expected.values() if id(series) not in used],
        [series for series in actual.values() if id(series) not in used],
    )


def _match_root_inputs(
    pairs: Sequence[SeriesPair], expected: SeriesByPort, actual: SeriesByPort
) -> list[SeriesPair]:
    """Match named arguments of the model with the same arguments of a module.

    Some tools record them for the model, others for its modules only.
    """
    found = []
    for series in _without_partner(pairs, expected, actual)[0]:
        port = series.port
        if port.direction != "input" or port.phase != "forward" or port.is_positional:
            continue
        partner = next(
            (
                other
                for other_port, other in actual.items()
                if other_port.name == port.name
                and "" in (port.module, other_port.module)
                and _are_alike(series, other)
            ),
            None,
        )
        if partner is not None:
            found.append(SeriesPair(series, partner))
    return found


def _group(series_of: SeriesByPort) -> dict[tuple[str, Phase], list[Series]]:
    groups: dict[tuple[str, Phase], list[Series]] = {}
    for port, series in series_of.items():
        groups.setdefault((port.module, port.phase), []).append(series)
    return groups


def match_modules(
    expected: SeriesByPort, actual: SeriesByPort, names: Mapping[str, str]
) -> dict[str, str]:
    """Return the actual module of each expected one: by `names`, then by name with or without prefix.

    names: module names, expected to actual; `*` matches the same text on both sides.
    Modules of one name with inputs of different widths compute different functions.
    """
    available = {port.module for port in actual}
    found = {}
    widths = _input_widths(expected), _input_widths(actual)
    without_prefix: dict[str, list[str]] = {}
    for module in available:
        without_prefix.setdefault(strip_model_prefixes(module), []).append(module)
    for module in {port.module: None for port in expected}:
        mapped = _apply_map(module, names)
        if mapped != module and mapped in available:
            found[module] = mapped
            continue
        alike = without_prefix.get(strip_model_prefixes(module), [])
        partner = module if module in available else alike[0] if len(alike) == 1 else None
        known = widths[0].get(module), widths[1].get(partner)
        if partner is not None and (None in known or known[0] == known[1]):
            found[module] = partner
    return found


def _input_widths(series_of: SeriesByPort) -> dict[str | None, int]:
    """Return the width of the first floating-point argument of each module that one rank calls."""
    found: dict[str | None, int] = {}
    for port, series in series_of.items():
        is_argument = port.direction == "input" and port.phase == "forward"
        if is_argument and is_activation(series) and not _is_on_ranks(series):
            found.setdefault(port.module, (series.first.shape or (0,))[-1])
    return found


def _apply_map(module: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in names.items():
        if fnmatchcase(module, pattern):
            head, star, tail = pattern.partition("*")
            middle = module[len(head) : len(module) - len(tail)] if star else ""
            return replacement.replace("*", middle)
    return module


def _match_ports(expected: list[Series], actual: list[Series]) -> list[tuple[Series, Series]]:
    """Match the ports of one module by name, then by order within a direction.

    Tools name an argument by position or by keyword, and differ in the name of a single result.
    """
    by_name = {series.port.name: series for series in actual}
    pairs = [(one, by_name[one.port.name]) for one in expected if one.port.name in by_name]
    used = {id(series) for pair in pairs for series in pair}
    for direction in ("input", "output"):
        free = [one for one in actual if id(one) not in used and one.port.direction == direction]
        for one in expected:
            if id(one) in used or one.port.direction != direction:
                continue
            partner = next((other for other in free if _may_be_same(one, other)), None)
            if partner is not None:
                free.remove(partner)
                pairs.append((one, partner))
    return pairs


def _may_be_same(expected: Series, actual: Series) -> bool:
    """Return True if two ports may be one argument or result.

    Integers with different names, such as ids and a mask, are different arguments.
    """
    dtype = expected.first.dtype
    is_named = not (expected.port.is_positional or actual.port.is_positional)
    is_index = bool(dtype) and "float" not in dtype
    if is_named and is_index and expected.port.direction == "input":
        return False
    return _are_alike(expected, actual)


def _are_alike(expected: Series, actual: Series) -> bool:
    """Return True if two tensors have the same shape and kind of values."""
    one, other = expected.first, actual.first
    if (one.shape is None) != (other.shape is None):
        return False
    same_kind = ("float" in one.dtype) == ("float" in other.dtype)
    if one.site.at.rank != other.site.at.rank or _is_on_ranks(expected) or _is_on_ranks(actual):
        return same_kind
    return same_kind and (one.shape is None or _size(one.shape) == _size(other.shape or ()))


def _is_on_ranks(series: Series) -> bool:
    return len(next(iter(series.tensors.values()))) > 1


def _size(shape: Iterable[int]) -> tuple[int, ...]:
    """Return a shape without dims of size 1."""
    return tuple(dim for dim in shape if dim != 1)


def _with_nearest(name: str, candidates: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, candidates[:2000], n=_NUM_NEAREST, cutoff=0.8)
    return f"{name} (nearest: {', '.join(near)})" if near else name


def is_allowed(name: str, globs: Sequence[str]) -> bool:
    """Return True if `--allow-unmatched` names a port, its module or a parent module.

    >>> is_allowed("model.layers.0.mlp:output (nearest: ...)", ["model.layers.*.mlp"])
    True
    """
    text = name.partition(" (nearest")[0]
    module = text.partition(":")[0]
    parts = module.split(".")
    names = [text, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]
    return any(fnmatchcase(one, glob) for one in names for glob in globs)
