"""Pairing of two dumps: passes, ports and token ids."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor

from assay.comparing.wording.numerals import format_count
from assay.dumps.protocol import Dump, DumpError
from assay.errors import name_some
from assay.metrics import PairSums
from assay.offline.expected_noise import coarser_unit
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.measuring.pair_measurer import PairMeasurer
from assay.offline.measuring.routing import Flip, ScoreNoise, find_flips
from assay.offline.measuring.shapes import take_both
from assay.offline.metrics.pair_metrics import TensorPair
from assay.offline.options import CompareOptions
from assay.offline.ports.expert_rows import place_expert_rows
from assay.offline.ports.joined_results import add_residuals, find_groups
from assay.offline.ports.lanes import LanePair, Lanes, collect_lanes
from assay.offline.ports.matching import Matching, match_lanes, match_modules
from assay.offline.ports.topology import Graph, match_by_topology
from assay.offline.tokens.alignment import TokenAlignment, align_passes, find_passes
from assay.offline.tokens.ids import LogitsOf, TokenComparison, compare_ids
from assay.offline.tokens.passes import PassPair

# With a smaller share of equal names, the two implementations name their modules differently.
_LEAST_NAMESAKES = 0.2

# A repeated block such as `model.layers.3`, but not an expert in it.
_BLOCK = re.compile(r"(?:[^.\d][^.]*\.)*\d+")

_LEVELS_UP_TO = {
    "logits": ("logits",),
    "layer": ("logits", "modules", "gradients"),
    "module": ("logits", "weights", "modules", "inputs", "gradients", "updates"),
    "op": ("logits", "weights", "modules", "inputs", "gradients", "updates", "operations"),
}


@dataclass(frozen=True)
class Pairing:
    """Two dumps, paired."""

    expected: Dump
    actual: Dump
    matching: Matching
    alignment: TokenAlignment
    tokens: TokenComparison
    lanes: tuple[Lanes, Lanes]
    """All selected ports of both dumps, with and without a partner."""
    notes: list[str]

    def find_flips(self, score_noise: ScoreNoise) -> list[Flip]:
        """Return the expert choices that differ at near ties."""
        pairs = self.alignment.pairs
        return find_flips(self.matching.pairs, pairs, self.expected, self.actual, score_noise)

    def measure(
        self,
        *,
        flips: Sequence[Flip] = (),
        flips_spread: bool = False,
        by_statistics: bool = False,
        sums: type[PairSums] = PairSums,
        finds_coarse: bool = False,
        add_metrics: Callable[[TensorPair], TensorPair] | None = None,
    ) -> MeasuredPorts:
        """Measure every pair of tensors with a `PairMeasurer`."""
        measurer = PairMeasurer(
            self.expected, self.actual, self.alignment, self.tokens.first_different,
            flips, flips_spread, by_statistics, finds_coarse, add_metrics, MeasuredPorts(sums=sums),
        )  # fmt: skip
        return measurer.measure(self.matching)

    @cached_property
    def unit_roundoff(self) -> float:
        """Return the unit roundoff of the coarsest dtype of the paired values."""
        lanes = [lane for pair in self.matching.pairs for lane in (pair.expected, pair.actual)]
        rounded = self.expected.rounded_to, self.actual.rounded_to
        return coarser_unit([*rounded, *(lane.first.dtype for lane in lanes)])


def pair_dumps(
    expected: Dump, actual: Dump, options: CompareOptions, name_map: Mapping[str, str]
) -> Pairing:
    """Pair the tokens, ports and ids of two dumps.

    name_map: the content of --map.
    Raises: DumpError if a dump holds nothing at the selected rank and level.
    """
    lanes, actual_lanes = _choose(expected, options), _choose(actual, options)
    passes, actual_passes = find_passes(expected, options.rank), find_passes(actual, options.rank)
    shift = options.token_shift
    if shift is None and {expected.format, actual.format} == {"assay"}:
        # A capture numbers its steps. Without tokens, only these numbers can pair the passes.
        knows_tokens = any(one.tokens is not None for one in (*passes, *actual_passes))
        shift = None if knows_tokens else 0
    alignment = align_passes(passes, actual_passes, shift)
    names = dict(name_map)
    _require_known(names, lanes, actual_lanes)
    notes = list(alignment.notes)
    by_name = match_modules(lanes, actual_lanes, names)
    if len(by_name) < _LEAST_NAMESAKES * len({port.module for port in lanes}) and alignment.pairs:
        first = alignment.pairs[0]
        found = match_by_topology(
            Graph(lanes, expected, first.expected), Graph(actual_lanes, actual, first.actual)
        )
        names = found | names
        notes.append(
            f"the dumps name modules differently: {format_count(len(found), 'module')} matched by order,"
            " kind and width; --map overrides"
        )
    opened = expected, actual
    partner_of = match_modules(lanes, actual_lanes, names)
    expected, actual = add_residuals(opened, (lanes, actual_lanes), partner_of)
    for side, dump, before in zip(("EXPECTED", "ACTUAL"), (expected, actual), opened, strict=True):
        if dump is not before:
            notes.append(f"{side} keeps hidden states and residuals apart: their sums are compared")
    if len(notes) > len(alignment.notes):
        lanes, actual_lanes = _choose(expected, options), _choose(actual, options)
    matching = match_lanes(lanes, actual_lanes, names)
    matching.pairs = find_groups(matching.pairs, expected, actual)
    tokens = compare_ids(alignment, _read_logits_with(expected, actual, matching, alignment))
    expected, actual = place_expert_rows(
        expected, actual, matching, alignment.pairs, tokens.first_different
    )
    return Pairing(expected, actual, matching, alignment, tokens, (lanes, actual_lanes), notes)


def _require_known(names: Mapping[str, str], expected: Lanes, actual: Lanes) -> None:
    """Raise DumpError for unknown module names in --map."""
    for side, patterns, lanes in (
        ("EXPECTED", names.keys(), expected),
        ("ACTUAL", names.values(), actual),
    ):
        modules = {port.module for port in lanes}
        for pattern in patterns:
            if not any(fnmatchcase(module, pattern) for module in modules):
                raise DumpError(f"--map: {side} has no module {pattern}")


def _choose(dump: Dump, options: CompareOptions) -> Lanes:
    lanes = collect_lanes(dump, options.rank)
    if options.level is not None:
        kept = _LEVELS_UP_TO[options.level]
        lanes = {port: lane for port, lane in lanes.items() if port.level in kept}
    if options.level == "layer":
        lanes = {
            port: lane
            for port, lane in lanes.items()
            if port.level == "logits" or _BLOCK.fullmatch(port.module)
        }
    if not lanes and dump.problems:
        raise DumpError(f"{dump.name} holds no tensor: {name_some(list(dump.problems))}")
    if not lanes:
        raise DumpError(
            f"{dump.name} holds nothing of the chosen rank and level; its ranks: {dump.ranks}"
        )
    return lanes


def _read_logits_with(
    expected: Dump, actual: Dump, matching: Matching, alignment: TokenAlignment
) -> LogitsOf:
    lanes = next((pair for pair in matching.pairs if pair.port.level == "logits"), None)

    def read(prompt: int, position: int) -> tuple[Tensor, Tensor] | None:
        if lanes is None:
            return None
        for pair in alignment.pairs:
            rows = pair.rows
            for row, place in enumerate(
                zip(rows.prompts, rows.positions, strict=True) if rows else ()
            ):
                if place[0] == prompt and position in place[1]:
                    number = row * len(place[1]) + place[1].index(position)
                    return _read_logits(expected, actual, lanes, pair, number)
        return None

    return read


def _read_logits(
    expected: Dump, actual: Dump, lanes: LanePair, pair: PassPair, number: int
) -> tuple[Tensor, Tensor] | None:
    """Return the logits of one paired token. number: its index among the tokens of the pair."""
    pair = pair.by_row()
    if pair.expected_rows is None or pair.actual_rows is None:
        return None
    at = slice(number, number + 1)
    pair = replace(pair, expected_rows=pair.expected_rows[at], actual_rows=pair.actual_rows[at])
    sides = lanes.expected.held_in(pair.expected), lanes.actual.held_in(pair.actual)
    if not len(sides[0]) == len(sides[1]) == 1:
        return None
    reference, value = expected.read_intact(sides[0][0]), actual.read_intact(sides[1][0])
    if reference is None or value is None:
        return None
    taken = take_both(pair, value, reference)
    return (taken[1].flatten(), taken[0].flatten()) if taken is not None else None
