"""Matching of the tensors of two dumps by module and port."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import starmap

from assay.offline.ports.joined_results import pair_fused
from assay.offline.ports.lanes import Lane, LanePair, Lanes
from assay.sites import Phase, strip_model_prefixes

_NUM_NEAREST = 3


@dataclass(slots=True)
class Matching:
    """Matched and unmatched ports of two dumps."""

    pairs: list[LanePair]
    """Pairs in the expected order."""
    absent_masks: list[Lane]
    """Expected attention masks of modules that ACTUAL called without a mask."""
    unmatched_expected: list[str]
    unmatched_actual: list[str]


def match_lanes(expected: Lanes, actual: Lanes, names: Mapping[str, str] | None = None) -> Matching:
    """Match the ports of two dumps.

    names: module names, expected to actual; `*` matches the same text on both sides.
    """
    partner_of = match_modules(expected, actual, names or {})
    groups_of_expected, groups_of_actual = _group(expected), _group(actual)
    pairs: list[LanePair] = []
    for (module, phase), lanes in groups_of_expected.items():
        partner = partner_of.get(module)
        candidates = groups_of_actual.get((partner, phase), []) if partner is not None else []
        pairs += starmap(LanePair, _match_ports(lanes, candidates))
    pairs += _match_root_inputs(pairs, expected, actual)
    pairs += pair_fused(*_without_partner(pairs, expected, actual))
    pairs.sort(key=lambda pair: pair.expected.order)
    left_expected, left_actual = _without_partner(pairs, expected, actual)
    names_left = [str(one.port) for one in left_actual]
    called = {one.actual.port.module for one in pairs if one.port.direction == "input"}
    masks = [
        one
        for one in left_expected
        if one.port.name.endswith("mask") and partner_of.get(one.port.module) in called
    ]
    left_expected = [one for one in left_expected if one not in masks]
    return Matching(
        pairs,
        masks,
        [_with_nearest(str(one.port), names_left) for one in left_expected],
        names_left,
    )


def _without_partner(
    pairs: Iterable[LanePair], expected: Lanes, actual: Lanes
) -> tuple[list[Lane], list[Lane]]:
    used = {id(lane) for pair in pairs for lane in (pair.expected, pair.actual)}
    return (
        [lane for lane in expected.values() if id(lane) not in used],
        [lane for lane in actual.values() if id(lane) not in used],
    )


def _match_root_inputs(pairs: Sequence[LanePair], expected: Lanes, actual: Lanes) -> list[LanePair]:
    """Match named arguments of the model with the same arguments of a module.

    Some tools record them for the model, others for its modules only.
    """
    found = []
    for lane in _without_partner(pairs, expected, actual)[0]:
        port = lane.port
        if port.direction != "input" or port.phase != "forward" or port.is_positional:
            continue
        partner = next(
            (
                other
                for other_port, other in actual.items()
                if other_port.name == port.name and "" in (port.module, other_port.module)
            ),
            None,
        )
        if partner is not None:
            found.append(LanePair(lane, partner))
    return found


def _group(lanes: Lanes) -> dict[tuple[str, Phase], list[Lane]]:
    groups: dict[tuple[str, Phase], list[Lane]] = {}
    for port, lane in lanes.items():
        groups.setdefault((port.module, port.phase), []).append(lane)
    return groups


def match_modules(expected: Lanes, actual: Lanes, names: Mapping[str, str]) -> dict[str, str]:
    """Return the actual module of each expected one: by `names`, then by name with or without prefix."""
    available = {port.module for port in actual}
    found = {}
    without_prefix: dict[str, list[str]] = {}
    for module in available:
        without_prefix.setdefault(strip_model_prefixes(module), []).append(module)
    for module in {port.module: None for port in expected}:
        mapped = _apply_map(module, names)
        if mapped in available:
            found[module] = mapped
        elif len(alike := without_prefix.get(strip_model_prefixes(module), [])) == 1:
            found[module] = alike[0]
    return found


def _apply_map(module: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in names.items():
        if fnmatchcase(module, pattern):
            head, star, tail = pattern.partition("*")
            middle = module[len(head) : len(module) - len(tail)] if star else ""
            return replacement.replace("*", middle)
    return module


def _match_ports(expected: list[Lane], actual: list[Lane]) -> list[tuple[Lane, Lane]]:
    """Match the ports of one module by name, then by order within a direction.

    Tools name an argument by position or by keyword, and differ in the name of a single result.
    """
    by_name = {lane.port.name: lane for lane in actual}
    pairs = [(one, by_name[one.port.name]) for one in expected if one.port.name in by_name]
    used = {id(lane) for pair in pairs for lane in pair}
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


def _may_be_same(expected: Lane, actual: Lane) -> bool:
    """Return True if two tensors have the same shape and kind of values.

    Integers with different names, such as ids and a mask, are different arguments.
    """
    one, other = expected.first, actual.first
    is_named = not (expected.port.is_positional or actual.port.is_positional)
    is_index = bool(one.dtype) and "float" not in one.dtype
    if is_named and is_index and expected.port.direction == "input":
        return False
    if (one.shape is None) != (other.shape is None):
        return False
    same_kind = ("float" in one.dtype) == ("float" in other.dtype)
    if one.site.at.rank != other.site.at.rank or _is_on_ranks(expected) or _is_on_ranks(actual):
        return same_kind
    return same_kind and (one.shape is None or _size(one.shape) == _size(other.shape or ()))


def _is_on_ranks(lane: Lane) -> bool:
    return len(next(iter(lane.tensors.values()))) > 1


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
