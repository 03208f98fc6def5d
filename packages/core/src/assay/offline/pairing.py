"""Pairing of two dumps: passes, ports and token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor

from assay.comparing.wording import format_count
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.readers.model_folder import TIED, load_settings
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
from assay.offline.ports.joined_results import add_residuals
from assay.offline.ports.lanes import BLOCK, LanePair, Lanes, Port, collect_lanes
from assay.offline.ports.matching import Matching, match_lanes, match_modules
from assay.offline.ports.samples import open_graphs
from assay.offline.ports.topology import match_by_topology
from assay.offline.tokens.alignment import TokenAlignment, align_passes, find_passes
from assay.offline.tokens.ids import LogitsOf, TokenComparison, compare_ids
from assay.offline.tokens.passes import Pass, PassPair
from assay.sites import ComparedLevel, strip_model_prefixes

# With a smaller share of equal names, the two implementations name their modules differently.
_LEAST_NAMESAKES = 0.2

_WEIGHT = "parameter.weight"

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

    def read_values(
        self, lanes: LanePair, flips: Sequence[Flip], *, flips_spread: bool
    ) -> list[TensorPair]:
        """Return the tensors of one pair with the values that a comparison uses."""
        found: list[TensorPair] = []

        def keep(pair: TensorPair) -> TensorPair:
            found.append(pair)
            return pair

        PairMeasurer(
            self.expected, self.actual, self.alignment, self.tokens.first_different,
            flips, flips_spread, add_metrics=keep,
        ).measure_pairs([lanes])  # fmt: skip
        return found

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
    all_lanes = _collect(expected, options), _collect(actual, options)
    passes, actual_passes = find_passes(expected, options.rank), find_passes(actual, options.rank)
    shift = options.token_shift
    if shift is None and {expected.format, actual.format} == {"assay"}:
        # A capture numbers its steps. Without tokens, only these numbers can pair the passes.
        knows_tokens = any(one.tokens is not None for one in (*passes, *actual_passes))
        shift = None if knows_tokens else 0
    alignment = align_passes(passes, actual_passes, shift)
    all_lanes = _add_tied((expected, actual), all_lanes)
    _require_known(name_map, *all_lanes)
    notes = list(alignment.notes)
    partner_of, guesses = match_modules(*all_lanes, name_map), set()
    if alignment.pairs:
        num_modules = len({port.module for port in all_lanes[0]})
        found = match_by_topology(
            *open_graphs(all_lanes, (expected, actual), alignment.pairs[0]),
            partner_of,
            by_order=len(partner_of) < _LEAST_NAMESAKES * num_modules,
        )
        partner_of, guesses = found | partner_of, set(found)
    opened = expected, actual
    expected, actual = add_residuals(opened, all_lanes, partner_of)
    for side, dump, before in zip(("EXPECTED", "ACTUAL"), (expected, actual), opened, strict=True):
        if dump is not before:
            notes.append(f"{side} keeps hidden states and residuals apart: their sums are compared")
    all_lanes = collect_lanes(expected, options.rank), collect_lanes(actual, options.rank)
    all_lanes = _add_tied((expected, actual), all_lanes)
    lanes, actual_lanes = (_choose(one, options.level) for one in all_lanes)
    graphs = None
    if alignment.pairs or all(port.direction == "parameter" for port in lanes):
        shared = next(iter(alignment.pairs), PassPair(Pass(0, 0, None), Pass(0, 0, None)))
        graphs = open_graphs(all_lanes, (expected, actual), shared)
    # The level is that of the expected port: the head may have another name in ACTUAL.
    matching = match_lanes(lanes, all_lanes[1], partner_of, guesses, graphs)
    chosen = {str(port) for port in actual_lanes}
    matching.unmatched_actual = [one for one in matching.unmatched_actual if one in chosen]
    if num_guessed := len({port.module for port in lanes} & guesses):
        notes.append(
            f"the dumps name modules differently: {format_count(num_guessed, 'module')} matched by order,"
            " kind, width and values; --map overrides"
        )
    if matching.rotated:
        notes.append(
            "the two sides order the channels of a head differently for rotary embedding, in halves or in"
            f" neighbors: {name_some(matching.rotated)} compared in one order"
        )
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


def _add_tied(dumps: tuple[Dump, Dump], lanes: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
    """Give each side the weights that only the other side stores, if it shares them with its embedding."""
    found = []
    for dump, own, other in zip(dumps, lanes, lanes[::-1], strict=True):
        weights = {
            port: lane
            for port, lane in own.items()
            if (port.name, port.phase) == (_WEIGHT, "forward")
        }
        holders = {port.module for port in own if port.is_of_parameter}
        callers = {port.module for port in own if port.direction == "output"} - holders
        added: Lanes = {}
        for port, lane in other.items():
            if (port.name, port.phase) != (_WEIGHT, "forward") or port in own:
                continue
            names = [
                one
                for one in callers
                if strip_model_prefixes(one) == strip_model_prefixes(port.module)
            ]
            alike = [one for one in weights.values() if one.first.shape == lane.first.shape]
            if dump.format == "model" and len(alike) == 1 and (load_settings(dump) or {}).get(TIED):
                names = [port.module]
            if len(names) == 1 and len(alike) == 1:
                shared = Port(names[0], _WEIGHT)
                added[shared] = replace(alike[0], port=shared)
        found.append(own | added)
    return found[0], found[1]


def _collect(dump: Dump, options: CompareOptions) -> Lanes:
    lanes = collect_lanes(dump, options.rank)
    if not lanes and dump.problems:
        raise DumpError(f"{dump.name} holds no tensor: {name_some(list(dump.problems))}")
    if not lanes:
        raise DumpError(f"{dump.name} holds nothing of the chosen rank; its ranks: {dump.ranks}")
    return lanes


def _choose(lanes: Lanes, level: ComparedLevel | None) -> Lanes:
    if level is None:
        return lanes
    kept = _LEVELS_UP_TO[level]
    return {
        port: lane
        for port, lane in lanes.items()
        if port.level in kept
        and (level != "layer" or port.level == "logits" or BLOCK.fullmatch(port.module))
    }


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
