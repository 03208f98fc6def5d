"""Simple changes of EXPECTED that explain a difference: a factor, another order, another module's values.

A change is named only if it leaves no more than the noise of a difference beyond the noise.

Shape legend: R rows of a weight, or tokens; C columns, or channels; K selected rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ne

import torch
from torch import Tensor

from assay.comparison.judging.judged_ports import JudgedPort, is_inside
from assay.comparison.measured_dumps import MeasuredDumps
from assay.comparison.measuring.pair_measurer import ROUNDOFFS, coarser_unit
from assay.comparison.pairing.port_series import BLOCK, Port, Series, SeriesPair
from assay.judge.wording import format_number
from assay.verdicts import Location

# Fewer rows or distinct values may agree by chance.
_FEWEST = 8
# Larger tensors are not described: float32 copies of both sides take 1 GB.
_MOST_VALUES = 1 << 27
# Rows that moved are searched by their distances in as many random directions.
_NUM_DIRECTIONS = 64
_MOST_MOVED, _ROWS_AT_ONCE = 1 << 14, 1 << 10
# Values that show how many are distinct.
_NUM_SAMPLED = 1 << 12
# Inputs of inner modules that are compared with those of similar modules.
_MOST_INPUTS = 16
# Random directions of unrelated values reduce a difference of 8 values by a third once in 20,000 cases, and
# to a tenth once in 10 million.
_REDUCED, _LARGELY_REDUCED = 1 / 3, 1 / 10

# Names of rows and columns.
OF_WEIGHT, OF_RESULT = ("rows", "columns"), ("tokens", "channels")


@dataclass(frozen=True, slots=True)
class Proof:
    """The condition under which a change explains a difference."""

    noise: float
    """Relative error within which two tensors are equal."""
    unit_roundoff: float

    def explains(self, actual: Tensor, changed: Tensor, expected: Tensor) -> bool:
        """Return True if `actual` equals `changed` within noise, and not `expected`. Shapes: alike."""
        size = float(changed.norm()) or float(expected.norm())
        left, before = float((actual - changed).norm()), float((actual - expected).norm())
        enough = max(ROUNDOFFS * self.unit_roundoff * size, _LARGELY_REDUCED * before)
        return before > self.noise * size and left <= min(
            self.noise * size, _REDUCED * before, enough
        )

    def find_different(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Return the numbers of the rows that differ by more than noise, (K,)."""
        norms, errors = expected.norm(dim=1), (actual - expected).norm(dim=1)
        different: Tensor = errors > self.noise * norms.clamp(min=norms.square().mean().sqrt())
        return different.nonzero().flatten()


def describe_values(actual: Tensor, expected: Tensor, proof: Proof, nouns: tuple[str, str]) -> str:
    """Describe a factor, a transposition or another order that turns `expected` into `actual`.

    Shapes: (R, C) both, float.
    nouns: names of rows and columns; weights may be transposed.
    Returns: a sentence; "" if none of them explains the difference.
    """
    if len(expected) < _FEWEST or not bool((actual + expected).isfinite().all()):
        return ""
    is_square = nouns == OF_WEIGHT and actual.shape[0] == actual.shape[1]
    if is_square and proof.explains(actual, expected.T, expected):
        return "It is the transpose of the expected one."
    sides = (actual, expected), (actual.T, expected.T)
    rows, columns = (proof.find_different(*one) for one in sides)
    some_rows, some_columns = (
        f"{len(one):,} of {size:,} {noun}"
        for one, size, noun in zip((rows, columns), expected.shape, nouns, strict=True)
    )
    every = slice(None)
    for of_rows, of_columns, place in (
        (every, every, ""),
        (rows, every, f" in {some_rows}"),
        (every, columns, f" in {some_columns}"),
        (rows, columns, f" in {some_rows} and {some_columns}"),
    ):
        part = [one[of_rows][:, of_columns] for one in (actual, expected)]
        if (factor := _find_factor(part[0], part[1], proof)) is not None:
            return f"It is {_describe_factor(factor)}{place}."
    for noun, one in zip(nouns, sides, strict=True):
        moved = _find_moved(*one, proof)
        if len(moved) == 2 and noun != "tokens":
            return f"Its {noun} {int(moved[0])} and {int(moved[1])} are swapped."
        if len(moved):
            return f"Its {noun} are in another order: {len(moved):,} of {len(one[0]):,} moved."
    return ""


def _find_factor(actual: Tensor, expected: Tensor, proof: Proof) -> float | None:
    """Return the factor by which `actual` is a multiple of `expected`, (R, C); None if it is not."""
    if int(expected.count_nonzero()) < _FEWEST:
        return None
    factor = float((actual * expected).sum() / expected.square().sum())
    return factor if proof.explains(actual, factor * expected, expected) else None


def _describe_factor(factor: float) -> str:
    """Show a factor with two digits of its difference from 1.

    >>> [_describe_factor(value) for value in (1.1, 1.00012, 0.0)]
    ['1.1 times the expected one', '1.00012 times the expected one', 'zero']
    """
    change = abs(factor - 1)
    digits = max(3, 2 - math.floor(math.log10(change))) if change else 3
    return f"{format_number(factor, digits)} times the expected one" if factor else "zero"


def _find_moved(actual: Tensor, expected: Tensor, proof: Proof) -> Tensor:
    """Return the numbers of the rows that other rows of `expected` replace one to one, (K,); or none."""
    moved = proof.find_different(actual, expected)
    value, reference = actual[moved], expected[moved]
    none = moved[:0]
    is_narrow = actual.shape[1] < _FEWEST
    if not 2 <= len(moved) <= _MOST_MOVED or (is_narrow and actual.shape[1] > 1):
        return none
    if len(reference.flatten()[:_NUM_SAMPLED].unique()) < _FEWEST:
        return none
    if is_narrow:
        return moved if torch.equal(value.sort(0).values, reference.sort(0).values) else none
    points = torch.stack([value, reference]).double()
    if value.shape[1] > _NUM_DIRECTIONS:
        seeded = torch.Generator().manual_seed(0)
        points @= torch.randn(value.shape[1], _NUM_DIRECTIONS, generator=seeded).double()
    order = torch.cat(
        [torch.cdist(part, points[1]).argmin(1) for part in points[0].split(_ROWS_AT_ONCE)]
    )
    is_whole = len(order.unique()) == len(moved)
    return moved if is_whole and proof.explains(value, reference[order], reference) else none


@dataclass(frozen=True, slots=True)
class _Place:
    """The values of two series where a judged port differs, (R, C), and their noise."""

    pair: SeriesPair
    actual: Tensor
    expected: Tensor
    proof: Proof

    def holds(self, changed: Tensor) -> bool:
        """Return True if ACTUAL holds `changed` here, and not the expected values."""
        is_alike = changed.shape == self.expected.shape
        return is_alike and self.proof.explains(self.actual, changed, self.expected)


def describe_change(
    dumps: MeasuredDumps, location: Location, judged: JudgedPort, failed: Sequence[JudgedPort]
) -> str:
    """Describe a simple change that explains the difference at `location`; "" if none does.

    judged: the port that decided on the location.
    failed: all ports that differ.
    """
    port, pairs = judged.port, dumps.pairing.matching.pairs
    is_reused = any(one.site.at.module == port.module for one in dumps.reused)
    is_place = location.module == port.module and location.phase == port.phase
    place = _open(dumps, judged) if is_place and not is_reused else None
    if place is None:
        return ""
    nouns = OF_WEIGHT if port.is_of_parameter else OF_RESULT
    found = describe_values(place.actual, place.expected, place.proof, nouns)
    if not found and (port.phase, port.direction) == ("forward", "output"):
        ports = [one for one in pairs if one.port.module == port.module]
        inputs = [_read(dumps, judged, one) for one in ports if one.port.direction == "input"]
        if any(one is not None and place.holds(one.actual) for one in inputs):
            return "ACTUAL returns its input unchanged."
    inner = [
        one
        for one in failed
        if one.port.direction == "input"
        and is_inside(one.port.module, port.module)
        and (one.port.phase, one.first_bad_pass) == (port.phase, judged.first_bad_pass)
    ]
    sources = (_describe_source(dumps, one, judged) for one in (judged, *inner[:_MOST_INPUTS]))
    return found or next(filter(None, sources), "")


def _open(dumps: MeasuredDumps, judged: JudgedPort) -> _Place | None:
    pairs = dumps.pairing.matching.pairs
    pair = next((one for one in pairs if one.port == judged.port), None)
    return _read(dumps, judged, pair) if pair and judged.port.direction != "op" else None


def _read(dumps: MeasuredDumps, judged: JudgedPort, pair: SeriesPair) -> _Place | None:
    """Read two series where `judged` differs; None without comparable values, or with too many."""
    result = judged.result
    at = judged.first_bad_pass if result.passes else None
    by_step = judged.port.phase != "forward" and dumps.expected.is_training
    tensors = {
        key: held
        for key, held in pair.expected.tensors.items()
        if (at is None or key[:2] == at) and (not by_step or key[1] == result.step)
    }
    sizes = [math.prod(one.shape or ()) for held in tensors.values() for one in held]
    if not 0 < sum(sizes) <= _MOST_VALUES:
        return None
    pair = replace(pair, expected=replace(pair.expected, tensors=tensors))
    values = [
        one.values
        for one in dumps.pairing.read_values(pair, dumps.flips, flips_spread=dumps.noise is None)
        if one.values is not None and one.actual.writer == result.rank
    ]
    if len({expected.shape[1] for _, expected in values}) != 1:
        return None
    actual, expected = (torch.cat(side) for side in zip(*values, strict=True))
    if not expected.is_floating_point() or len(expected) < _FEWEST:
        return None
    unit, noise = dumps.pairing.unit_roundoff, judged.expected_noise
    for one in judged.ratios:
        if one.statistic == "accumulated":
            noise = max(one.limit * one.expected, unit)
    if judged.port.level == "weights":
        unit = coarser_unit([pair.expected.first.dtype, pair.actual.first.dtype])
        noise = ROUNDOFFS * unit
    dtype = torch.promote_types(expected.dtype, torch.float32)
    return _Place(pair, actual.to(dtype), expected.to(dtype), Proof(noise, unit))


def _describe_source(dumps: MeasuredDumps, judged: JudgedPort, origin: JudgedPort) -> str:
    """Name the only similar port whose expected values ACTUAL holds at `judged`; or return "".

    origin: the located port, which may contain `judged`.
    """
    place, series_of = _open(dumps, judged), dumps.pairing.series_of[0]
    if place is None or len(place.actual.flatten()[:_NUM_SAMPLED].unique()) < _FEWEST:
        return ""
    port, found = place.pair.expected.port, list[Series]()
    for series in series_of.values():
        # The paths of similar modules differ in one part, such as the number of the block.
        parts = series.port.module.split("."), port.module.split(".")
        is_similar = len(parts[0]) == len(parts[1]) and sum(map(ne, *parts)) == 1
        if not is_similar or (series.port.name, series.port.phase) != (port.name, port.phase):
            continue
        if port.direction == "parameter" and not _may_hold(place, series):
            continue
        other = _read(dumps, judged, SeriesPair(series, place.pair.actual))
        if other is not None and place.holds(other.expected):
            found.append(series)
    if len(found) != 1:
        return ""
    source, missing = found[0].port, _describe_missing(dumps, port, found[0].port)
    if judged is not origin:
        return f"{port.module} gets the input that {source.module} gets in EXPECTED{missing}."
    pairs = [one for one in dumps.pairing.matching.pairs if one.port == source]
    for one in [_read(dumps, judged, pair) for pair in pairs]:
        if one is not None and one.holds(place.expected):
            return f"It and {source} are swapped."
    return f"It holds the expected values of {source}{missing}."


def _may_hold(place: _Place, weight: Series) -> bool:
    """Return False for a weight whose first rows are not those of ACTUAL. It need not be read whole."""
    stored = weight.first.read_intact()
    if stored is None or not stored.ndim:
        return False
    rows = stored.reshape(-1, stored.shape[-1] if stored.ndim > 1 else 1)[:_FEWEST].float()
    own = place.actual[:_FEWEST]
    return rows.shape == own.shape and not len(place.proof.find_different(own, rows))


def _describe_missing(dumps: MeasuredDumps, port: Port, source: Port) -> str:
    """Name the block that ACTUAL lacks, if it holds the values of `source` at `port`; or return ""."""
    own, other = BLOCK.match(port.module), BLOCK.match(source.module)
    blocks = [
        {
            found[0]
            for one in series_of
            if one.direction == port.direction and (found := BLOCK.match(one.module))
        }
        for series_of in dumps.pairing.series_of
    ]
    lacking = blocks[0] - blocks[1]
    if own is None or other is None or own[1] != other[1] or len(lacking) != 1:
        return ""
    if port.direction == "input":
        return f": ACTUAL lacks {other[0]}" if other[0] in lacking else ""
    numbers = [int(one[0].removeprefix(one[1])) for one in (own, other)]
    return f": ACTUAL lacks {own[0]}" if numbers[1] == numbers[0] + 1 else ""
