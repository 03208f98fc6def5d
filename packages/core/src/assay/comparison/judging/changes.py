"""Simple changes of EXPECTED that explain a difference: a factor, another order, another module's values.

Shape legend: R rows of a weight, or tokens; C columns, or channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ne

import torch
from torch import Tensor

from assay.comparison.judging.judged_ports import JudgedPort, is_inside
from assay.comparison.measured_dumps import MeasuredDumps
from assay.comparison.measuring.pair_measurer import coarser_unit
from assay.comparison.pairing.port_series import BLOCK, Port, Series, SeriesPair
from assay.value_changes import (
    FEWEST,
    MOST_VALUES,
    NUM_SAMPLED,
    OF_RESULT,
    OF_WEIGHT,
    ROUNDOFFS,
    Proof,
    describe_values,
)
from assay.verdicts import Location

# Inputs of inner modules that are compared with those of similar modules.
_MOST_INPUTS = 16


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
    if not 0 < sum(sizes) <= MOST_VALUES:
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
    if not expected.is_floating_point() or len(expected) < FEWEST:
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
    if place is None or len(place.actual.flatten()[:NUM_SAMPLED].unique()) < FEWEST:
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
    rows = stored.reshape(-1, stored.shape[-1] if stored.ndim > 1 else 1)[:FEWEST].float()
    own = place.actual[:FEWEST]
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
