"""Pairing fused projections with the parts that another implementation computes one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.offline.ports.lanes import Lane, LanePair, Span


@dataclass(frozen=True, slots=True)
class _Module:
    """A module without a partner, with its lanes by port name."""

    name: str
    lanes: dict[str, Lane]
    width: int

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def pair_fused(expected: Sequence[Lane], actual: Sequence[Lane]) -> list[LanePair]:
    """Pair lanes without a partner, where one module computes what several compute on the other side.

    A fused module is as wide as consecutive modules of one parent together, such as `qkv_proj` for
    `q_proj`, `k_proj` and `v_proj`. Both directions are tried, in the order of the network.
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
    """Return the first consecutive modules of one parent, at least two, as wide as `fused`."""
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
