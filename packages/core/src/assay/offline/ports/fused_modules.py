"""Pairing of fused projections with the separate projections of another implementation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from assay.dumps.protocol import Dump
from assay.offline.ports.lanes import Lane, LanePair, Span

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
