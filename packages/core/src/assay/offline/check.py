"""`assay compare`: reads two dumps, compares them, and writes the verdict."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from assay.comparing.limits import load_limits
from assay.comparing.wording import dumps as wording
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.files import read_json_object, read_toml
from assay.models.remote_code import RemoteCode
from assay.offline.judging import Evidence, judge_dumps
from assay.offline.lanes import LanePair, Lanes, collect_lanes
from assay.offline.locating import coarser_unit, level_of
from assay.offline.matching import Matching, is_allowed, match_lanes, match_modules
from assay.offline.measuring import Measured, PairMeasurer
from assay.offline.mixed_passes import split_mixed_passes
from assay.offline.passes import PassPair
from assay.offline.replaying import TrustedModel, replay_dump
from assay.offline.rows import take_rows
from assay.offline.token_ids import LogitsOf, compare_ids
from assay.offline.tokens import TokenAlignment, align_passes, find_passes
from assay.offline.topology import Graph, match_by_topology
from assay.runs import Progress
from assay.runs.results import write_results
from assay.sites import RecordedLevel
from assay.verdicts import Verdict

# With fewer modules of the same name, the dumps come from implementations that name modules differently.
_LEAST_NAMESAKES = 0.2

_LEVELS_UP_TO = {
    "logits": ("logits", "weights"),
    "module": ("logits", "weights", "modules", "gradients"),
    "op": ("logits", "weights", "modules", "gradients", "operations"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. command: what to type for the same comparison."""

    expected: str
    actual: str
    model: str | None = None
    remote_code: RemoteCode = "refuse"
    noise: str | None = None
    level: RecordedLevel | None = None
    name_map: str | None = None
    allow_unmatched: tuple[str, ...] = ()
    rank: int | None = None
    token_shift: int | None = None
    format: str | None = None
    limits: str = "noise"
    stats: bool = False
    command: tuple[str, ...] = field(default=(), compare=False)


def compare(comparison: Comparison, folder: Path, progress: Progress) -> Verdict:
    """Compare two dumps, and write verdict.json and measurements.jsonl into `folder`."""
    names = _read_map(comparison.name_map)
    with progress.step("reads the indexes"):
        expected, expected_note = _open(comparison.expected, comparison.format)
        actual, actual_note = _open(comparison.actual, comparison.format)
        noise = _open(comparison.noise)[0] if comparison.noise else None
    lanes = {id(dump): _lanes(dump, comparison) for dump in (expected, actual)}
    alignment = _align(expected, actual, comparison)
    topology = _match_topology(
        expected, actual, lanes[id(expected)], lanes[id(actual)], alignment, names
    )
    matching = match_lanes(lanes[id(expected)], lanes[id(actual)], topology | names)
    tokens = compare_ids(alignment, _read_logits_with(expected, actual, matching, alignment))
    with progress.step("compares the dumps"):
        measurer = PairMeasurer(
            expected, actual, alignment, tokens.first_different, comparison.stats
        )
        measured = measurer.measure(matching)
    measured_noise = None
    if noise is not None:
        with progress.step("measures the noise"):
            measured_noise = _measure_noise(expected, noise, comparison, lanes[id(expected)])
    limits = load_limits(comparison.limits)
    replayed = None
    if comparison.model is not None:
        with progress.step(f"replays {actual.path} with {comparison.model}"):
            trusted = TrustedModel(comparison.model, comparison.remote_code)
            passes = find_passes(actual, comparison.rank)
            replayed = replay_dump(trusted, actual, passes, _activation_dtype(actual), limits)
    evidence = Evidence(
        ports=[pair.port for pair in matching.pairs],
        absent_masks={lane.port for lane in matching.absent_masks},
        measured=measured,
        noise=measured_noise,
        noise_origin=f"the noise of {noise.path}" if noise else wording.EXPECTED_NOISE,
        replayed=replayed,
        tokens=tokens,
        alignment=alignment,
        unit_roundoff=coarser_unit([*_dtypes(matching), expected.rounded_to, actual.rounded_to]),
        unmatched_expected=[
            name
            for name in (
                *matching.unmatched_expected,
                *measured.unpaired,
                *(f"tokens of {one}" for one in alignment.missing),
            )
            if not is_allowed(name, comparison.allow_unmatched)
        ],
        unmatched_actual=matching.unmatched_actual,
        notes=[
            *filter(None, (expected_note, actual_note)),
            *_notes(measured),
            *([wording.describe_topology(len(topology))] if topology else []),
        ],
        accepts_statistics=comparison.stats,
        problems=[f"{dump.path}: {text}" for dump in (expected, actual) for text in dump.problems],
    )
    verdict, measurements = judge_dumps(evidence, limits)
    verdict = verdict.model_copy(
        update={"reference": _describe(expected), "candidate": _describe(actual)}
    )
    return write_results(verdict, measurements, folder, comparison.command)


def _open(path: str, format_name: str | None = None) -> tuple[Dump, str]:
    return split_mixed_passes(open_dump(path, format_name))


def _match_topology(
    expected: Dump, actual: Dump, expected_lanes: Lanes, actual_lanes: Lanes,
    alignment: TokenAlignment, names: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Match modules by topology if few have a namesake."""
    modules = {port.module for port in expected_lanes}
    by_name = match_modules(expected_lanes, actual_lanes, names)
    if len(by_name) >= _LEAST_NAMESAKES * len(modules) or not alignment.pairs:
        return {}
    first = alignment.pairs[0]
    return match_by_topology(
        Graph(expected_lanes, expected.read, first.expected.batch, first.expected.step),
        Graph(actual_lanes, actual.read, first.actual.batch, first.actual.step),
    )


def _notes(measured: Measured) -> list[str]:
    repeated = list(dict.fromkeys(measured.repeated))
    if not repeated:
        return []
    return [f"EXPECTED holds the same values twice in a pass: {name_some(repeated)}"]


def _describe(dump: Dump) -> dict[str, str]:
    return {"run": str(dump.path), "format": dump.format, **dump.provenance}


def _lanes(dump: Dump, comparison: Comparison) -> Lanes:
    lanes = collect_lanes(dump, comparison.rank)
    if comparison.level is not None:
        kept = _LEVELS_UP_TO[comparison.level]
        lanes = {port: lane for port, lane in lanes.items() if level_of(port) in kept}
    if not lanes:
        raise DumpError(f"{dump.path} holds nothing of the chosen rank and level")
    return lanes


def _align(expected: Dump, other: Dump, comparison: Comparison) -> TokenAlignment:
    return align_passes(
        find_passes(expected, comparison.rank),
        find_passes(other, comparison.rank),
        comparison.token_shift,
    )


def _measure_noise(expected: Dump, noise: Dump, comparison: Comparison, lanes: Lanes) -> Measured:
    matching = match_lanes(lanes, _lanes(noise, comparison))
    alignment = _align(expected, noise, comparison)
    logits_of = _read_logits_with(expected, noise, matching, alignment)
    first_different = compare_ids(alignment, logits_of).first_different
    return PairMeasurer(expected, noise, alignment, first_different).measure(matching)


def _read_logits_with(
    expected: Dump, actual: Dump, matching: Matching, alignment: TokenAlignment
) -> LogitsOf:
    """Return the function that reads the logits of one token from both dumps."""
    lanes = next((pair for pair in matching.pairs if level_of(pair.port) == "logits"), None)

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
    """Return the logits of one paired token; number: among the tokens of the pair."""
    found = []
    sides = (
        (expected, lanes.expected, pair.expected, pair.expected_rows),
        (actual, lanes.actual, pair.actual, pair.actual_rows),
    )
    for dump, lane, one, rows in sides:
        tensors = lane.tensors.get((one.batch, one.step, 0), [])
        if len(tensors) != 1 or not tensors[0].has_values:
            return None
        row = torch.tensor([number if rows is None else int(rows[number])])
        taken = take_rows(dump.read(tensors[0]), one, row)
        if taken is None or not bool(taken[1].all()):
            return None
        found.append(taken[0].flatten())
    return found[0], found[1]


def _dtypes(matching: Matching) -> list[str]:
    return [lane.first.dtype for pair in matching.pairs for lane in (pair.expected, pair.actual)]


def _activation_dtype(dump: Dump) -> str:
    """Return the dtype of most floating-point activations."""
    counts = Counter(
        one.dtype
        for one in dump.tensors
        if one.dtype in FORMATS and not one.site.port.startswith("parameter.")
    )
    return counts.most_common(1)[0][0] if counts else "float32"


def _read_map(path: str | None) -> dict[str, str]:
    """Read --map: a TOML or JSON table of expected to actual module names."""
    if path is None:
        return {}
    file = Path(path).expanduser()
    table = read_json_object(file) if file.suffix == ".json" else read_toml(file)
    names = {str(key): value for key, value in table.items() if isinstance(value, str)}
    if len(names) != len(table):
        raise DumpError(f"{path} holds more than pairs of module names")
    return names
