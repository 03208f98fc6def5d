"""Normalization, pairing and measurement of two dumps, before they are judged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from assay.comparison.importing import (
    describe_reused,
    find_lost_ranks,
    find_reused_buffers,
    import_dump,
    leave_out_reused,
    take_order,
)
from assay.comparison.measuring.pair_measurer import (
    MeasuredPorts,
    PairMeasurer,
    coarser_unit,
    expected_score_noise,
    measured_score_noise,
)
from assay.comparison.measuring.pair_values import (
    CustomMetric,
    TensorPair,
    measure_as_published,
    measure_metrics,
    measure_pair,
    take_both,
)
from assay.comparison.pairing.experts import Flip, ScoreNoise, find_flips, place_expert_rows
from assay.comparison.pairing.fused_projections import add_residuals
from assay.comparison.pairing.matching import (
    Matching,
    match_by_topology,
    match_modules,
    match_series,
)
from assay.comparison.pairing.passes import (
    Pass,
    PassPair,
    TokenAlignment,
    TokenComparison,
    align_passes,
    compare_ids,
    find_passes,
)
from assay.comparison.pairing.port_series import (
    BLOCK,
    Port,
    SeriesByPort,
    SeriesPair,
    collect_series,
    open_graphs,
)
from assay.comparison.replaying import Replayed
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpedTensor, DumpError
from assay.errors import UsageError, name_some
from assay.files import read_json_object, read_toml
from assay.judge import dump_wording as wording
from assay.judge.limits import Limits, load_limits
from assay.judge.wording import format_count
from assay.metrics import NormSums, PairSums
from assay.models.config_files import TIED, load_settings
from assay.models.sources import RemoteCode
from assay.progress import Progress
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


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The options of a comparison."""

    expected: str
    actual: str
    model: str | None = None
    remote_code: RemoteCode = "refuse"
    noise: str | None = None
    level: ComparedLevel | None = None
    """The deepest level to compare; None for all."""
    name_map: str | None = None
    """A TOML or JSON file of expected to actual module names."""
    order: str | None = None
    """A text file of EXPECTED's modules in the order of their calls, one a line."""
    allow_unmatched: tuple[str, ...] = ()
    rank: int | None = None
    """The only rank to compare; None for all."""
    token_shift: int | None = None
    """Number of an actual pass minus the number of its expected pass; None to find it."""
    format: str | None = None
    model_name: str | None = None
    """The model to compare in captures of several."""
    limits: str = "noise"
    stats: bool = False
    metrics: tuple[str, ...] = ()
    """FILE.py:FUNC of each custom metric."""
    compat: bool = False
    """Compute metrics by the published formulas, not the corrected ones."""
    table: Path | None = None
    """File for a table of all tensors."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The command line that repeats the comparison."""


@dataclass(frozen=True)
class Pairing:
    """Two dumps, paired."""

    expected: Dump
    actual: Dump
    matching: Matching
    alignment: TokenAlignment
    tokens: TokenComparison
    series_of: tuple[SeriesByPort, SeriesByPort]
    """All selected ports of both dumps, with and without a partner."""
    notes: list[str]

    def find_flips(self, score_noise: ScoreNoise) -> list[Flip]:
        """Return the expert choices that differ at near ties."""
        pairs = self.alignment.pairs
        return find_flips(self.matching.pairs, pairs, score_noise)

    @property
    def measurer(self) -> PairMeasurer:
        """Return a new measurer of the pairs, without measurements."""
        return PairMeasurer(self.alignment, self.expected.is_training, self.tokens.first_different)

    def read_values(
        self, matched: SeriesPair, flips: Sequence[Flip], *, flips_spread: bool
    ) -> list[TensorPair]:
        """Return the tensors of one pair with the values that a comparison uses."""
        measurer = replace(
            self.measurer, flips=flips, flips_spread=flips_spread, add_metrics=lambda pair: pair
        )
        measurer.measure_pairs([matched])
        return measurer.measured.pairs

    @cached_property
    def unit_roundoff(self) -> float:
        """Return the unit roundoff of the coarsest dtype of the paired values."""
        sides = [side for pair in self.matching.pairs for side in (pair.expected, pair.actual)]
        stored = [series.first.dtype for series in sides]
        return coarser_unit([self.expected.rounded_to, self.actual.rounded_to, *stored])


def pair_dumps(
    expected: Dump, actual: Dump, options: CompareOptions, name_map: Mapping[str, str]
) -> Pairing:
    """Pair the tokens, ports and ids of two dumps.

    name_map: the content of --map.
    Raises: DumpError if a dump holds nothing at the selected rank and level.
    """
    both = _collect(expected, options), _collect(actual, options)
    passes, actual_passes = find_passes(expected, options.rank), find_passes(actual, options.rank)
    shift = options.token_shift
    if shift is None and {expected.format, actual.format} == {"assay"}:
        # A capture numbers its steps. Without tokens, only these numbers can pair the passes.
        knows_tokens = any(one.tokens is not None for one in (*passes, *actual_passes))
        shift = None if knows_tokens else 0
    alignment = align_passes(passes, actual_passes, shift)
    both = _add_tied((expected, actual), both)
    _require_known(name_map, *both)
    notes = list(alignment.notes)
    partner_of, guesses = match_modules(*both, name_map), set()
    if alignment.pairs:
        num_modules = len({port.module for port in both[0]})
        found = match_by_topology(
            *open_graphs(both, alignment.pairs[0]),
            partner_of,
            by_order=len(partner_of) < _LEAST_NAMESAKES * num_modules,
        )
        partner_of, guesses = found | partner_of, set(found)
    stored, both = both, add_residuals(both, partner_of)
    for side, before, after in zip(("EXPECTED", "ACTUAL"), stored, both, strict=True):
        if after is not before:
            notes.append(f"{side} keeps hidden states and residuals apart: their sums are compared")
    series_of, actual_series = (_choose(one, options.level) for one in both)
    graphs = None
    if alignment.pairs or all(port.direction == "parameter" for port in series_of):
        shared = next(iter(alignment.pairs), PassPair(Pass(0, 0, None), Pass(0, 0, None)))
        graphs = open_graphs(both, shared)
    # The level is that of the expected port: the head may have another name in ACTUAL.
    matching = match_series(series_of, both[1], partner_of, guesses, graphs)
    chosen = {str(port) for port in actual_series}
    matching.unmatched_actual = [one for one in matching.unmatched_actual if one in chosen]
    if num_guessed := len({port.module for port in series_of} & guesses):
        notes.append(
            f"the dumps name modules differently: {format_count(num_guessed, 'module')} matched by order,"
            " kind, width and values; --map overrides"
        )
    if matching.rotated:
        notes.append(
            "the two sides order the channels of a head differently for rotary embedding, in halves or in"
            f" neighbors: {name_some(matching.rotated)} compared in one order"
        )
    tokens = compare_ids(alignment, partial(_read_logits, matching, alignment))
    place_expert_rows(matching, alignment.pairs, tokens.first_different)
    return Pairing(expected, actual, matching, alignment, tokens, (series_of, actual_series), notes)


def _require_known(names: Mapping[str, str], expected: SeriesByPort, actual: SeriesByPort) -> None:
    """Raise DumpError for unknown module names in --map."""
    for side, patterns, series_of in (
        ("EXPECTED", names.keys(), expected),
        ("ACTUAL", names.values(), actual),
    ):
        modules = {port.module for port in series_of}
        for pattern in patterns:
            if not any(fnmatchcase(module, pattern) for module in modules):
                raise DumpError(f"--map: {side} has no module {pattern}")


def _add_tied(
    dumps: tuple[Dump, Dump], series_of: tuple[SeriesByPort, SeriesByPort]
) -> tuple[SeriesByPort, SeriesByPort]:
    """Give each side the weights that only the other side stores, if it shares them with its embedding."""
    found = []
    for dump, own, other in zip(dumps, series_of, series_of[::-1], strict=True):
        weights = {
            port: series
            for port, series in own.items()
            if (port.name, port.phase) == (_WEIGHT, "forward")
        }
        holders = {port.module for port in own if port.is_of_parameter}
        callers = {port.module for port in own if port.direction == "output"} - holders
        added: SeriesByPort = {}
        for port, series in other.items():
            if (port.name, port.phase) != (_WEIGHT, "forward") or port in own:
                continue
            names = [
                one
                for one in callers
                if strip_model_prefixes(one) == strip_model_prefixes(port.module)
            ]
            alike = [one for one in weights.values() if one.first.shape == series.first.shape]
            if (
                dump.format == "model"
                and len(alike) == 1
                and (load_settings(dump.path) or {}).get(TIED)
            ):
                names = [port.module]
            if len(names) == 1 and len(alike) == 1:
                shared = Port(names[0], _WEIGHT)
                added[shared] = replace(alike[0], port=shared)
        found.append(own | added)
    return found[0], found[1]


def _collect(dump: Dump, options: CompareOptions) -> SeriesByPort:
    series_of = collect_series(dump, options.rank)
    if not series_of and dump.problems:
        raise DumpError(f"{dump.name} holds no tensor: {name_some(list(dump.problems))}")
    if not series_of:
        raise DumpError(f"{dump.name} holds nothing of the chosen rank; its ranks: {dump.ranks}")
    return series_of


def _choose(series_of: SeriesByPort, level: ComparedLevel | None) -> SeriesByPort:
    if level is None:
        return series_of
    kept = _LEVELS_UP_TO[level]
    return {
        port: series
        for port, series in series_of.items()
        if port.level in kept
        and (level != "layer" or port.level == "logits" or BLOCK.fullmatch(port.module))
    }


def _read_logits(
    matching: Matching, alignment: TokenAlignment, prompt: int, position: int
) -> tuple[Tensor, Tensor] | None:
    """Return expected and actual logits of a token, (V,); None unless both dumps hold them."""
    matched = next((pair for pair in matching.pairs if pair.port.level == "logits"), None)
    for pair in map(PassPair.by_row, alignment.pairs) if matched is not None else ():
        rows = pair.rows
        places = list(zip(rows.prompts, rows.positions, strict=True)) if rows is not None else []
        if matched is None or (prompt, (position,)) not in places:
            continue
        number = places.index((prompt, (position,)))
        if pair.expected_rows is None or pair.actual_rows is None:
            return None
        at = slice(number, number + 1)
        of_token = replace(
            pair, expected_rows=pair.expected_rows[at], actual_rows=pair.actual_rows[at]
        )
        sides = matched.expected.held_in(pair.expected), matched.actual.held_in(pair.actual)
        if not len(sides[0]) == len(sides[1]) == 1:
            return None
        reference, value = (side[0].read_intact() for side in sides)
        if reference is None or value is None:
            return None
        taken = take_both(of_token, value, reference)
        return (taken[1].flatten(), taken[0].flatten()) if taken is not None else None
    return None


# Rounding causes no larger relative error of a whole tensor, in any dtype that models run in.
_LARGEST_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredDumps:
    """Two dumps, measured."""

    comparison: CompareOptions
    expected: Dump
    actual: Dump
    limits: Limits
    pairing: Pairing
    measured: MeasuredPorts
    noise: MeasuredPorts | None
    """Errors of the noise dump, if there is one."""
    flips: Sequence[Flip]
    """Expert choices that differ at near ties."""
    reused: list[DumpedTensor]
    """Tensors of ACTUAL that hold the values of another step."""
    lost_ranks: set[int]
    replayed: Replayed | None = None
    """The replay of ACTUAL; None without --model."""

    @property
    def ports(self) -> list[Port]:
        """Return the ports with a partner, in the expected order."""
        return [*(pair.port for pair in self.pairing.matching.pairs), *self.measured.updates]

    @property
    def noise_origin(self) -> str:
        """Return the source of the noise, in words."""
        if self.comparison.noise:
            return f"the noise of {self.comparison.noise}"
        if self.noise is not None:
            return f"the noise of {self.dtype} that {self.expected.name} holds"
        return wording.EXPECTED_NOISE

    @property
    def dtype(self) -> str:
        """Return the dtype of most activations of ACTUAL."""
        return activation_dtype(self.actual)


def measure_dumps(
    comparison: CompareOptions, expected: Dump, actual: Dump, progress: Progress,
    noise: Dump | None, custom: Sequence[CustomMetric],
) -> MeasuredDumps:  # fmt: skip
    """Measure every pair of tensors. Under torchrun the ranks share the work, and each returns all results.

    Raises: UsageError for contradictory options; DumpError for dumps that cannot be paired.
    """
    name_map = _read_map(comparison.name_map)
    expected = import_dump(take_order(expected, comparison.order))
    actual = import_dump(actual)
    lost = find_lost_ranks(expected, actual) if comparison.rank is None else set()
    expected = replace(
        expected, tensors=[one for one in expected.tensors if one.site.at.rank not in lost]
    )
    expected = leave_out_reused(expected)
    dtype = activation_dtype(actual)
    limits = _load_limits(comparison, dtype)
    unit = coarser_unit([activation_dtype(expected), dtype, expected.rounded_to])
    score_noise = expected_score_noise(unit)
    measured_noise = None
    if noise is not None:
        with progress.step("measuring the noise"):
            measured_noise = measure_noise(comparison, expected, noise, name_map, score_noise)
        score_noise = measured_score_noise(measured_noise, score_noise)
    add_metrics = None
    if comparison.table is not None or limits.names_metrics:
        formulas = measure_as_published if comparison.compat else measure_metrics
        add_metrics = partial(measure_pair, formulas, custom)
    with progress.step("comparing the dumps"):
        pairing = pair_dumps(expected, actual, comparison, name_map)
        if noise is None and (measured_noise := read_recorded_noise(pairing, dtype)) is not None:
            score_noise = measured_score_noise(measured_noise, score_noise)
        flips = pairing.find_flips(score_noise)
        measurer = replace(
            pairing.measurer,
            flips=flips,
            flips_spread=noise is None,
            by_statistics=comparison.stats,
            finds_coarse=True,
            add_metrics=add_metrics,
            measured=MeasuredPorts(sums=PairSums if noise is not None else NormSums),
        )
        measured = measurer.measure(pairing.matching)
    return MeasuredDumps(
        comparison, expected, actual, limits, pairing, measured, measured_noise, flips,
        find_reused_buffers(actual), lost,
    )  # fmt: skip


def measure_noise(
    comparison: CompareOptions,
    expected: Dump,
    noise: Dump,
    name_map: Mapping[str, str],
    scores: ScoreNoise,
) -> MeasuredPorts:
    """Measure the errors of the noise dump.

    scores: the expected noise of router scores.
    Raises: DumpError unless it is a healthy run of the same model on the same prompts.
    """
    pairing = pair_dumps(expected, import_dump(noise), comparison, name_map)
    measurer = replace(pairing.measurer, flips=pairing.find_flips(scores))
    measured = measurer.measure(pairing.matching)
    _require_healthy(comparison, pairing, measured)
    return measured


def read_recorded_noise(pairing: Pairing, dtype: str) -> MeasuredPorts | None:
    """Return the noise of `dtype` recorded in EXPECTED; None if there is none."""
    measured = MeasuredPorts(sums=NormSums)
    for matched in pairing.matching.pairs:
        for tensors in matched.expected.tensors.values():
            for one in tensors:
                if (noise := one.noise.get(dtype)) is not None:
                    error, norm, num_elements = noise
                    step = one.site.at.step if pairing.expected.is_training else 0
                    result = measured.at(matched.port, 0, step, torch.empty(0), one.class_name)
                    result.sums.dd += error**2
                    result.sums.ee += norm**2
                    result.sums.num_elements += num_elements
    return measured if measured.results else None


def _load_limits(comparison: CompareOptions, dtype: str) -> Limits:
    limits = load_limits(comparison.limits, dtype)
    needs_noise = comparison.model or comparison.noise or comparison.stats
    if needs_noise and not limits.names_noise_ratios:
        raise UsageError(
            "--model, --noise and --stats judge by noise ratios,"
            f" and the limits {limits.name!r} name none"
        )
    return limits


def _require_healthy(comparison: CompareOptions, pairing: Pairing, noise: MeasuredPorts) -> None:
    """Raise DumpError for a noise dump of another model or other prompts: it would excuse any error."""
    problem = ""
    worst = max(
        (
            error
            for port in (pair.port for pair in pairing.matching.pairs)
            for one in noise.of(port)
            if math.isfinite(error := one.sums.relative_error)
        ),
        default=math.inf,
    )
    reused = describe_reused(find_reused_buffers(pairing.actual))
    if reused:
        problem = reused[0]
    elif comparison.noise == comparison.actual:
        problem = "it is ACTUAL itself"
    elif comparison.noise == comparison.expected:
        problem = "it is EXPECTED itself, whose error is 0"
    elif pairing.alignment.is_unrelated or pairing.tokens.different_prompts:
        problem = "it holds other prompts than EXPECTED"
    elif worst > _LARGEST_NOISE:
        problem = (
            f"its values differ from EXPECTED's by {worst:.2g} of their size, far beyond rounding"
        )
    if problem:
        raise DumpError(f"--noise {comparison.noise}: {problem}")


def activation_dtype(dump: Dump) -> str:
    """Return the dtype of most floating-point activations."""
    counts = Counter(
        one.dtype
        for one in dump.tensors
        if one.dtype in FORMATS and not one.site.port.startswith("parameter.")
    )
    return counts.most_common(1)[0][0] if counts else "float32"


def _read_map(path: str | None) -> dict[str, str]:
    """Read --map, a TOML or JSON table of expected to actual module names."""
    if path is None:
        return {}
    file = Path(path).expanduser()
    table = read_json_object(file) if file.suffix == ".json" else read_toml(file)
    names = {str(key): value for key, value in table.items() if isinstance(value, str)}
    if len(names) != len(table):
        raise DumpError(f"{path} may hold only pairs of module names")
    return names
