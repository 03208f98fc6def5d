"""Results that only one of two implementations joins: fused projections, sums of hidden state and residual."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.ports.lanes import Lane, LanePair, Lanes, Span

# Number of values of the first call that determine the interleaving.
_NUM_VALUES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Module:
    """A module without a partner, and its lanes by port name."""

    name: str
    lanes: dict[str, Lane]
    width: int

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def pair_fused(expected: Sequence[Lane], actual: Sequence[Lane]) -> list[LanePair]:
    """Pair lanes without a partner, where one module fuses several modules of the other side.

    A fused module is as wide as consecutive modules of one parent together, such as `qkv_proj` for `q_proj`,
    `k_proj` and `v_proj`. Either side may be the fused one.
    """
    pairs = _pair(_modules_of(actual), _modules_of(expected))
    found = [LanePair(part, fused, None, span) for fused, part, span in pairs]
    pairs = _pair(_modules_of(expected), _modules_of(actual))
    return found + [LanePair(fused, part, span, None) for fused, part, span in pairs]


def _modules_of(lanes: Sequence[Lane]) -> list[_Module]:
    by_module: dict[str, dict[str, Lane]] = {}
    for lane in lanes:
        if lane.port.phase == "forward" and lane.port.direction != "op":
            by_module.setdefault(lane.port.module, {})[lane.port.name] = lane
    found = []
    for name, ports in by_module.items():
        output = next((lane for port, lane in ports.items() if port.startswith("output")), None)
        if output is not None and output.first.shape:
            found.append(_Module(name, ports, output.first.shape[-1]))
    return found


def _pair(fused: list[_Module], parts: list[_Module]) -> list[tuple[Lane, Lane, Span | None]]:
    found: list[tuple[Lane, Lane, Span | None]] = []
    start = 0
    for module in fused:
        run = _find_run(parts, start, module)
        if run is None:
            continue
        first, end = run
        offset = 0
        for part in parts[first:end]:
            found += _pair_lanes(module, part, Span(offset, part.width))
            offset += part.width
        start = end
    return found


def _find_run(parts: list[_Module], start: int, fused: _Module) -> tuple[int, int] | None:
    """Return the range of the first consecutive modules of one parent, at least two, as wide as `fused`."""
    for first in range(start, len(parts) - 1):
        total = 0
        for end in range(first, len(parts)):
            if parts[end].parent != parts[first].parent:
                break
            total += parts[end].width
            if total == fused.width and end > first:
                return first, end + 1
    return None


def _pair_lanes(fused: _Module, part: _Module, span: Span) -> list[tuple[Lane, Lane, Span | None]]:
    found: list[tuple[Lane, Lane, Span | None]] = []
    for port, lane in part.lanes.items():
        direction = lane.port.direction
        other = fused.lanes.get(port) or next(
            (one for name, one in fused.lanes.items() if name.split(".")[0] == direction), None
        )
        if other is not None:
            found.append((other, lane, None if direction == "input" else span))
    return found


def find_groups(pairs: Sequence[LanePair], expected: Dump, actual: Dump) -> list[LanePair]:
    """Return the pairs, with the number of groups in the spans of interleaved fused modules.

    Some models interleave projections by head, or gate and up projection value by value. The values decide.
    """
    of_module: dict[tuple[str, str], list[LanePair]] = {}
    for pair in pairs:
        if pair.expected_span is not None or pair.actual_span is not None:
            fused = pair.expected if pair.expected_span is not None else pair.actual
            of_module.setdefault((fused.port.module, pair.port.phase), []).append(pair)
    groups: dict[int, int] = {}
    for parts in of_module.values():
        found = _choose_groups(parts, expected, actual)
        groups |= {id(pair): found for pair in parts}
    return [_with_groups(pair, groups.get(id(pair), 1)) for pair in pairs]


def _choose_groups(parts: Sequence[LanePair], expected: Dump, actual: Dump) -> int:
    """Return the number of groups for which all outputs agree best."""
    outputs = [pair for pair in parts if pair.port.direction == "output"]
    if not outputs:
        return 1
    spans = [pair.expected_span or pair.actual_span for pair in outputs]
    width = math.gcd(*(span.length for span in spans if span is not None))
    candidates = [number for number in range(1, width + 1) if width % number == 0]
    errors = dict.fromkeys(candidates, 0.0)
    for pair in outputs:
        theirs = expected.read_intact(pair.expected.first)
        ours = actual.read_intact(pair.actual.first)
        if theirs is None or ours is None:
            return 1
        num_rows = max(1, _NUM_VALUES // max(theirs.shape[-1], ours.shape[-1]))
        theirs, ours = (one.flatten(0, -2)[:num_rows].double() for one in (theirs, ours))
        for number in candidates:
            chosen = _with_groups(pair, number)
            reference, value = (
                span.of(one, is_parameter=False) if span is not None else one
                for one, span in ((theirs, chosen.expected_span), (ours, chosen.actual_span))
            )
            if value.shape != reference.shape:
                return 1
            errors[number] += float(torch.linalg.vector_norm(value - reference))
    return min(candidates, key=errors.__getitem__)


def _with_groups(pair: LanePair, number: int) -> LanePair:
    if number == 1:
        return pair
    theirs, ours = (
        replace(span, groups=number) if span is not None else None
        for span in (pair.expected_span, pair.actual_span)
    )
    return LanePair(pair.expected, pair.actual, theirs, ours)


_Addends = tuple[Lane, Lane]
_Groups = dict[tuple[str, str], list[Lane]]


def add_residuals(
    dumps: tuple[Dump, Dump], lanes: tuple[Lanes, Lanes], partner_of: Mapping[str, str]
) -> tuple[Dump, Dump]:
    """Add hidden state and residual of either dump where the other dump holds only their sum.

    Inference engines return both from a layer, and add them in the next norm.
    The values decide: a norm gets both tensors too, but only its first one has a partner.
    partner_of: module names of the first dump to names of the second.
    """
    groups = _group_floats(lanes[0]), _group_floats(lanes[1])
    found: tuple[list[_Addends], list[_Addends]] = ([], [])
    for (module, direction), ours in groups[0].items():
        sides = ours, groups[1].get((partner_of.get(module, ""), direction), [])
        addends = [_find_addends(side) for side in sides]
        for number, pair in enumerate(addends):
            whole = sides[1 - number]
            if pair is None or not whole or addends[1 - number] is not None:
                continue
            if _is_sum(dumps[number], pair, dumps[1 - number], whole[0]):
                found[number].append(pair)
    return _with_sums(dumps[0], found[0]), _with_sums(dumps[1], found[1])


def _group_floats(lanes: Lanes) -> _Groups:
    groups: _Groups = {}
    for port, lane in lanes.items():
        is_float = "float" in lane.first.dtype
        if port.phase == "forward" and port.direction in ("input", "output") and is_float:
            groups.setdefault((port.module, port.direction), []).append(lane)
    return groups


def _find_addends(lanes: Sequence[Lane]) -> _Addends | None:
    """Return the first two neighbors with the same shape and calls."""
    for pair in pairwise(lanes):
        one, other = (lane.first for lane in pair)
        has_values = one.has_values and other.has_values
        if has_values and one.shape is not None and one.shape == other.shape:
            return pair if pair[0].tensors.keys() == pair[1].tensors.keys() else None
    return None


def _is_sum(dump: Dump, addends: _Addends, other: Dump, whole: Lane) -> bool:
    """Return True if the sum of two tensors is closer to `whole` than the first one alone."""
    hidden, residual = (dump.read_intact(lane.first) for lane in addends)
    reference = other.read_intact(whole.first)
    if hidden is None or residual is None or reference is None:
        return False
    if hidden.numel() != reference.numel():
        return False
    expected = reference.double().flatten()
    alone, added = (one.double().flatten() - expected for one in (hidden, hidden + residual))
    return bool(added.norm() < alone.norm())


def _with_sums(dump: Dump, found: Sequence[_Addends]) -> Dump:
    """Return a dump with each first tensor replaced by the sum, and without the second one."""
    if not found:
        return dump
    second = {
        hidden.site: residual
        for one, other in found
        for key, tensors in one.tensors.items()
        for hidden, residual in zip(tensors, other.tensors[key], strict=False)
    }
    dropped = {residual.site for residual in second.values()}

    def read(tensor: DumpedTensor) -> Tensor:
        residual = second.get(tensor.site)
        value = dump.read(tensor)
        return value if residual is None else value + dump.read(residual)

    return replace(
        dump, tensors=[one for one in dump.tensors if one.site not in dropped], read=read
    )
