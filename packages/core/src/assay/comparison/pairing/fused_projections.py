"""Results that only one of two implementations joins: fused projections, sums of hidden state and residual."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import Tensor

from assay.comparison.pairing.port_series import (
    SIMILAR,
    Graph,
    Series,
    SeriesByPort,
    SeriesPair,
    Span,
    relative_error,
    sample_error,
    without_numbers,
)
from assay.dumps.protocol import DumpedTensor


@dataclass(frozen=True, slots=True)
class _Module:
    """A module without a partner, and its series by port name."""

    name: str
    series_of: dict[str, Series]
    output: Series
    width: int

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def pair_fused(
    graphs: tuple[Graph, Graph], expected: Sequence[Series], actual: Sequence[Series]
) -> list[SeriesPair]:
    """Pair series without a partner, where one module fuses several modules of the other side.

    A fused module is as wide as consecutive modules of one parent together, such as `qkv_proj` for `q_proj`,
    `k_proj` and `v_proj`. Either side may be the fused one. The values of a part must confirm the pair, in
    the order of the parts or interleaved: by head, or gate and up projection value by value.
    """
    found = _pair(graphs[::-1], _modules_of(actual), _modules_of(expected))
    pairs = [SeriesPair(part, fused, None, span, is_guess=True) for fused, part, span in found]
    found = _pair(graphs, _modules_of(expected), _modules_of(actual))
    return pairs + [
        SeriesPair(fused, part, span, None, is_guess=True) for fused, part, span in found
    ]


def _modules_of(all_series: Sequence[Series]) -> list[_Module]:
    by_module: dict[str, dict[str, Series]] = {}
    for series in all_series:
        if series.port.phase == "forward" and series.port.direction != "op":
            by_module.setdefault(series.port.module, {})[series.port.name] = series
    found = []
    for name, ports in by_module.items():
        output = next((series for port, series in ports.items() if port.startswith("output")), None)
        if output is not None and output.first.shape:
            found.append(_Module(name, ports, output, output.first.shape[-1]))
    return found


def _pair(
    graphs: tuple[Graph, Graph], fused: list[_Module], parts: list[_Module]
) -> list[tuple[Series, Series, Span | None]]:
    """Pair fused modules of the first graph with parts in the second one.

    All parts must agree in one of the blocks, whose parts and groups the other blocks then share. If no
    block is without an error, all parts but one must agree.
    """
    found: list[tuple[Series, Series, Span | None]] = []
    # By name of the fused module: the names of its parts, and their groups. They are the same in all blocks.
    patterns: dict[str, tuple[list[str], int]] = {}
    for most_wrong in (0, None, 1):  # None: the parts and groups of another block
        for module in list(fused):
            for run in _find_runs(parts, module, graphs):
                names = [without_numbers(one.name) for one in run]
                known = patterns.get(without_numbers(module.name))
                if most_wrong is not None:
                    groups = _find_groups(module, run, graphs, most_wrong)
                else:
                    groups = known[1] if known is not None and known[0] == names else None
                if groups is None:
                    continue
                patterns[without_numbers(module.name)] = names, groups
                offset = 0
                for part in run:
                    found += _pair_series(module, part, Span(offset, part.width, groups))
                    offset += part.width
                parts = [one for one in parts if one not in run]
                fused.remove(module)
                break
    return found


def _find_runs(
    parts: list[_Module], fused: _Module, graphs: tuple[Graph, Graph]
) -> Iterator[list[_Module]]:
    """Yield runs of modules of one parent, with the input width of `fused`, and as wide as it together.

    Those in a block of the same number come first.
    """
    width = _input_width(graphs[0], fused)
    parts = [one for one in parts if width in (None, _input_width(graphs[1], one) or width)]
    parts.sort(key=lambda one: block_number(one.name) != block_number(fused.name))
    families: dict[str, list[_Module]] = {}
    for one in parts:
        families.setdefault(one.parent, []).append(one)
    for siblings in families.values():
        for first in range(len(siblings)):
            for end in range(first + 2, len(siblings) + 1):
                if sum(one.width for one in siblings[first:end]) == fused.width:
                    yield siblings[first:end]


def _input_width(graph: Graph, module: _Module) -> int | None:
    return next(
        (one.first.shape[-1] for one in graph.inputs_of(module.name) if one.first.shape), None
    )


def block_number(name: str) -> str | None:
    """Return the first number of a path, which is that of its block."""
    number = re.search(r"\d+", name)
    return number[0] if number else None


def _find_groups(
    fused: _Module, parts: list[_Module], graphs: tuple[Graph, Graph], most_wrong: int
) -> int | None:
    """Return the number of interleaved groups for which the parts agree best.

    most_wrong: the largest number of parts that may differ.
    Returns: None if more parts differ, or no part can be compared.
    """
    whole = graphs[0].sample(fused.output)
    values = [graphs[1].sample(one.output) for one in parts]
    width = math.gcd(*(one.width for one in parts))
    best: tuple[float, int] | None = None
    for number in (one for one in range(1, width + 1) if width % one == 0):
        offset, errors = 0, []
        for part, value in zip(parts, values, strict=True):
            span = Span(offset, part.width, number)
            offset += part.width
            if whole is not None and value is not None:
                errors.append(_error_of_part(span, whole, value))
        if errors and sum(not one <= SIMILAR for one in errors) <= min(most_wrong, len(errors) - 1):
            best = min(best or (math.inf, 0), (sum(min(one, 2.0) for one in errors), number))
    return best[1] if best is not None else None


def _error_of_part(span: Span, whole: Tensor, value: Tensor) -> float:
    """Return the relative error of a part, whose heads may be stored for the other form of rotary embedding."""
    error = relative_error(span.of(whole, is_parameter=False), value)
    orders = _head_orders(span.length) if SIMILAR < error < math.inf else []
    reordered = (replace(span, head=one).of(whole, is_parameter=False) for one in orders)
    return min([error, *(relative_error(one, value) for one in reordered)])


def _head_orders(width: int) -> list[tuple[int, int]]:
    """Return the orders of the channels in heads of each possible size, see `Span.head`."""
    sizes = [one for one in range(4, width + 1, 2) if width % one == 0]
    return [order for one in sizes for order in ((one // 2, 2), (2, one // 2))]


def _pair_series(
    fused: _Module, part: _Module, span: Span
) -> list[tuple[Series, Series, Span | None]]:
    found: list[tuple[Series, Series, Span | None]] = []
    for port, series in part.series_of.items():
        direction = series.port.direction
        other = fused.series_of.get(port) or next(
            (one for name, one in fused.series_of.items() if name.split(".")[0] == direction), None
        )
        if other is not None:
            found.append((other, series, None if direction == "input" else span))
    return found


# Names of projections whose heads are stored for either form of rotary embedding.
_ROTATED = re.compile(r"(?:w|to_|linear_)?(?:q|k|query|key)(?:_|$)")
# A layout that explains a difference leaves at most this share of it.
_EXPLAINED = 0.1


def find_rotary_layouts(
    pairs: Sequence[SeriesPair], graphs: tuple[Graph, Graph]
) -> tuple[list[SeriesPair], list[str]]:
    """Return the pairs, with heads reordered where the two sides pair their rotary channels differently.

    One side rotates the halves of a head, the other one neighboring channels. The scores do not depend on it,
    so the output of a module around the projection must agree, in one of the blocks. In dumps of weights
    alone, queries and keys must have one order.
    Returns: also the modules whose heads are reordered.
    """
    orders: dict[str, tuple[int, int]] = {}
    confirmed: set[str] = set()
    has_results = any(one.port.direction == "output" for one in pairs)
    for pair in pairs:
        module, port = pair.port.module, pair.port
        is_chosen = port.direction == "output" if has_results else port.name == "parameter.weight"
        is_result = is_chosen and port.phase == "forward"
        before = sample_error(pair, graphs) if is_result and _ROTATED.match(_last(module)) else 0.0
        if SIMILAR / 10 < before < math.inf:
            shapes = _head_orders((pair.expected_span or pair.actual_span or _whole(pair)).length)
            errors = {one: sample_error(_reorder(pair, one), graphs) for one in shapes}
            best = min(shapes, key=errors.__getitem__, default=None)
            if best is not None and errors[best] <= _EXPLAINED * before:
                orders[module] = best
                confirmed |= (
                    {without_numbers(module)} if _agrees_around(pair, pairs, graphs) else set()
                )
    if has_results:
        orders = {name: one for name, one in orders.items() if without_numbers(name) in confirmed}
    else:
        alike = Counter((name.rpartition(".")[0], one) for name, one in orders.items())
        orders = {
            name: one for name, one in orders.items() if alike[name.rpartition(".")[0], one] > 1
        }
    return [
        _reorder(pair, orders[pair.port.module])
        if pair.port.module in orders and pair.port.direction in ("output", "parameter")
        else pair
        for pair in pairs
    ], list(orders)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _whole(pair: SeriesPair) -> Span:
    dim = 0 if pair.port.direction == "parameter" else -1
    return Span(0, pair.actual.first.shape[dim] if pair.actual.first.shape else 0)


def _reorder(pair: SeriesPair, head: tuple[int, int]) -> SeriesPair:
    """Return a pair whose part of the fused side, or all of ACTUAL, has its heads transposed."""
    if pair.expected_span is not None:
        return replace(pair, expected_span=replace(pair.expected_span, head=head))
    return replace(pair, actual_span=replace(pair.actual_span or _whole(pair), head=head))


def _agrees_around(
    pair: SeriesPair, pairs: Sequence[SeriesPair], graphs: tuple[Graph, Graph]
) -> bool:
    """Return True if the nearest module around that of `pair` has a similar output."""
    around = [
        one
        for one in pairs
        if (one.port.direction, one.port.phase) == ("output", "forward")
        and f".{pair.port.module}".startswith(f".{one.port.module}.".replace("..", "."))
        and one.port.module != pair.port.module
    ]
    nearest = max(around, key=lambda one: len(one.port.module), default=None)
    return nearest is not None and sample_error(nearest, graphs) <= SIMILAR / 5


_Addends = tuple[Series, Series]
_Groups = dict[tuple[str, str], list[Series]]


def add_residuals(
    series_of: tuple[SeriesByPort, SeriesByPort], partner_of: Mapping[str, str]
) -> tuple[SeriesByPort, SeriesByPort]:
    """Add hidden state and residual of either dump where the other dump holds only their sum.

    Inference engines return both from a layer, and add them in the next norm.
    The values decide: a norm gets both tensors too, but only its first one has a partner.
    partner_of: module names of the first dump to names of the second.
    """
    groups = _group_floats(series_of[0]), _group_floats(series_of[1])
    found: tuple[list[_Addends], list[_Addends]] = ([], [])
    for (module, direction), ours in groups[0].items():
        sides = ours, groups[1].get((partner_of.get(module, ""), direction), [])
        addends = [_find_addends(side) for side in sides]
        for number, pair in enumerate(addends):
            whole = sides[1 - number]
            other = addends[1 - number]
            if pair is None or not whole or (other and _size(other[0]) == _size(pair[0])):
                continue
            if _is_sum(pair, whole[0]):
                found[number].append(pair)
    return _with_sums(series_of[0], found[0]), _with_sums(series_of[1], found[1])


def _group_floats(series_of: SeriesByPort) -> _Groups:
    groups: _Groups = {}
    for port, series in series_of.items():
        is_float = "float" in series.first.dtype
        if port.phase == "forward" and port.direction in ("input", "output") and is_float:
            groups.setdefault((port.module, port.direction), []).append(series)
    return groups


def _find_addends(all_series: Sequence[Series]) -> _Addends | None:
    """Return the first two neighbors with the same shape, calls and ranks."""
    for pair in pairwise(all_series):
        one, other = (series.first for series in pair)
        has_values = one.has_values and other.has_values
        if has_values and one.shape is not None and one.shape == other.shape:
            calls = [{key: len(held) for key, held in series.tensors.items()} for series in pair]
            return pair if calls[0] == calls[1] else None
    return None


def _size(series: Series) -> int:
    return math.prod(series.first.shape or ())


def _is_sum(addends: _Addends, whole: Series) -> bool:
    """Return True if the sum of two tensors is closer to `whole` than the first one alone."""
    hidden, residual = (series.first.read_intact() for series in addends)
    reference = whole.first.read_intact()
    if hidden is None or residual is None or reference is None:
        return False
    if hidden.numel() != reference.numel():
        return False
    expected = reference.double().flatten()
    alone, added = (one.double().flatten() - expected for one in (hidden, hidden + residual))
    return bool(added.norm() < alone.norm())


def _with_sums(series_of: SeriesByPort, found: Sequence[_Addends]) -> SeriesByPort:
    """Return the series with each first one replaced by the sums, and without the second one."""
    if not found:
        return series_of
    residual_of = {hidden.port: residual for hidden, residual in found}
    dropped = {residual.port for _, residual in found}
    return {
        port: _add(series, residual_of[port]) if port in residual_of else series
        for port, series in series_of.items()
        if port not in dropped
    }


def _add(hidden: Series, residual: Series) -> Series:
    tensors = {
        key: [
            replace(one, load=partial(_add_both, one, other))
            for one, other in zip(held, residual.tensors[key], strict=True)
        ]
        for key, held in hidden.tensors.items()
    }
    return replace(hidden, tensors=tensors)


def _add_both(hidden: DumpedTensor, residual: DumpedTensor) -> Tensor:
    return hidden.read() + residual.read()
