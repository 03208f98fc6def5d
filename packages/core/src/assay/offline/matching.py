"""Matching the tensors of two dumps by module and port."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from assay.dumps.protocol import Dump, DumpedTensor
from assay.sites import Phase

# Prefixes by which implementations of one model differ: with or without a head, or with a vision part.
_PREFIXES = ("model.", "language_model.", "transformer.")

_NUM_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one module in one phase, over all passes of a dump."""

    module: str
    name: str
    phase: Phase = "forward"

    def __str__(self) -> str:
        """Return the name that messages and `--allow-unmatched` use."""
        phase = "" if self.phase == "forward" else f" ({self.phase})"
        return f"{self.module or '(model)'}:{self.name}{phase}"

    @property
    def direction(self) -> str:
        """Return the first word of the name: input, output, parameter or op."""
        return self.name.partition(".")[0]


@dataclass(slots=True)
class Lane:
    """All tensors at one port."""

    port: Port
    class_name: str
    order: int
    tensors: dict[tuple[int, int, int], list[DumpedTensor]] = field(default_factory=dict)
    """By batch, step and call, the tensors of all ranks that hold one, lowest rank first."""

    @property
    def first(self) -> DumpedTensor:
        """Return the tensor of the first pass and rank."""
        return next(iter(self.tensors.values()))[0]


Lanes = dict[Port, Lane]


def collect_lanes(dump: Dump, rank: int | None = None) -> Lanes:
    """Return the ports of a dump, in the order in which their calls first finished.

    rank: only tensors of this rank; None for all.
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


@dataclass(slots=True)
class Matching:
    """Partners of two dumps."""

    pairs: list[tuple[Lane, Lane]]
    """Expected and actual lane, in the expected order."""
    absent_masks: list[Lane]
    """Expected attention masks of matched modules that were called without a mask."""
    unmatched_expected: list[str]
    unmatched_actual: list[str]


def match_lanes(expected: Lanes, actual: Lanes, names: Mapping[str, str] | None = None) -> Matching:
    """Match the ports of two dumps.

    names: module names, expected to actual; a `*` stands for the same text on both sides.
    """
    partner_of = _match_modules(
        list(dict.fromkeys(port.module for port in expected)),
        list(dict.fromkeys(port.module for port in actual)),
        names or {},
    )
    groups_of_expected, groups_of_actual = _group(expected), _group(actual)
    pairs: list[tuple[Lane, Lane]] = []
    for (module, phase), lanes in groups_of_expected.items():
        partner = partner_of.get(module)
        candidates = groups_of_actual.get((partner, phase), []) if partner is not None else []
        pairs += _match_ports(lanes, candidates)
    pairs += _match_root_inputs(pairs, expected, actual)
    matched_expected = {id(one) for one, _ in pairs}
    matched_actual = {id(one) for _, one in pairs}
    pairs.sort(key=lambda pair: pair[0].order)
    left_expected = [one for one in expected.values() if id(one) not in matched_expected]
    left_actual = [one for one in actual.values() if id(one) not in matched_actual]
    names_left = [str(one.port) for one in left_actual]
    called = {one.port.module for _, one in pairs if one.port.direction == "input"}
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


def _match_root_inputs(
    pairs: Sequence[tuple[Lane, Lane]], expected: Lanes, actual: Lanes
) -> list[tuple[Lane, Lane]]:
    """Match named arguments of the model with those of the first module that gets them.

    Some tools write them for the model, others for its modules only.
    """
    used = {id(lane) for pair in pairs for lane in pair}
    found = []
    for port, lane in expected.items():
        if port.direction != "input" or port.phase != "forward" or id(lane) in used:
            continue
        if port.name.rpartition(".")[2].isdigit():
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
            found.append((lane, partner))
    return found


def _group(lanes: Lanes) -> dict[tuple[str, Phase], list[Lane]]:
    groups: dict[tuple[str, Phase], list[Lane]] = {}
    for port, lane in lanes.items():
        groups.setdefault((port.module, port.phase), []).append(lane)
    return groups


def _match_modules(
    expected: Sequence[str], actual: Sequence[str], names: Mapping[str, str]
) -> dict[str, str]:
    """Return the actual module of each expected one: by --map, by name, by name without prefix."""
    available = set(actual)
    found = {}
    without_prefix: dict[str, list[str]] = {}
    for module in actual:
        without_prefix.setdefault(_strip(module), []).append(module)
    for module in expected:
        mapped = _apply_map(module, names)
        if mapped in available:
            found[module] = mapped
        elif len(alike := without_prefix.get(_strip(module), [])) == 1:
            found[module] = alike[0]
    return found


def _strip(module: str) -> str:
    while module.startswith(_PREFIXES):
        module = module.partition(".")[2]
    return module


def _apply_map(module: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in names.items():
        if fnmatchcase(module, pattern):
            head, star, tail = pattern.partition("*")
            middle = module[len(head) : len(module) - len(tail)] if star else ""
            return replacement.replace("*", middle)
    return module


def _match_ports(expected: list[Lane], actual: list[Lane]) -> list[tuple[Lane, Lane]]:
    """Match the ports of one module: by name, then by order among those of the same direction.

    Tools differ in how they name an argument (by position or by keyword) and a single result.
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
    """Return True if two tensors have the same shape and kind of values."""
    one, other = expected.first, actual.first
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
    """Return True if `--allow-unmatched` names a port, its module or a module around it.

    >>> is_allowed("model.layers.0.mlp:output (nearest: ...)", ["model.layers.*.mlp"])
    True
    """
    text = name.partition(" (nearest")[0]
    module = text.partition(":")[0]
    parts = module.split(".")
    names = [text, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]
    return any(fnmatchcase(one, glob) for one in names for glob in globs)
