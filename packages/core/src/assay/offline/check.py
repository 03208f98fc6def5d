"""`assay compare`: reads two dumps, compares them, and writes the verdict."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from assay.comparing.limits import load_limits
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import read_json_object, read_toml
from assay.models.remote_code import RemoteCode
from assay.offline.judging import Evidence, judge_dumps
from assay.offline.locating import coarser_unit, level_of
from assay.offline.matching import (
    Lane,
    Lanes,
    Matching,
    collect_lanes,
    is_allowed,
    match_lanes,
)
from assay.offline.measuring import Measured, measure_pairs
from assay.offline.replaying import TrustedModel, replay_dump
from assay.offline.token_ids import LogitsOf, compare_ids
from assay.offline.tokens import PassPair, TokenAlignment, align_passes, find_passes
from assay.runs import Progress
from assay.runs.results import write_results
from assay.sites import RecordedLevel
from assay.verdicts import Verdict

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
    command: tuple[str, ...] = field(default=(), compare=False)


def compare(comparison: Comparison, folder: Path, progress: Progress) -> Verdict:
    """Compare two dumps, and write verdict.json and measurements.jsonl into `folder`."""
    names = _read_map(comparison.name_map)
    with progress.step("reads the indexes"):
        expected = open_dump(comparison.expected, comparison.format)
        actual = open_dump(comparison.actual, comparison.format)
        noise = open_dump(comparison.noise) if comparison.noise else None
    lanes = {id(dump): _lanes(dump, comparison) for dump in (expected, actual)}
    matching = match_lanes(lanes[id(expected)], lanes[id(actual)], names)
    alignment = _align(expected, actual, comparison)
    tokens = compare_ids(alignment, _read_logits_with(expected, actual, matching))
    with progress.step("compares the dumps"):
        measured = measure_pairs(expected, actual, matching, alignment, tokens.excluded)
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
        ports=[lane.port for lane, _ in matching.pairs],
        absent_masks={lane.port for lane in matching.absent_masks},
        measured=measured,
        noise=measured_noise,
        noise_origin=f"noise of {comparison.noise}" if noise else "expected of its dtype and depth",
        replayed=replayed,
        tokens=tokens,
        alignment=alignment,
        unit_roundoff=coarser_unit(_dtypes(matching)),
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
        problems=[f"{dump.path}: {text}" for dump in (expected, actual) for text in dump.problems],
    )
    verdict, measurements = judge_dumps(evidence, limits)
    verdict = verdict.model_copy(
        update={"reference": _describe(expected), "candidate": _describe(actual)}
    )
    return write_results(verdict, measurements, folder, comparison.command)


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
    excluded = compare_ids(alignment, _read_logits_with(expected, noise, matching)).excluded
    return measure_pairs(expected, noise, matching, alignment, excluded)


def _read_logits_with(expected: Dump, actual: Dump, matching: Matching) -> LogitsOf:
    """Return the function that reads the logits of a pass from both dumps."""
    lanes: tuple[Lane, Lane] | None = next(
        (pair for pair in matching.pairs if level_of(pair[0].port) == "logits"), None
    )

    def read(pair: PassPair) -> tuple[Tensor, Tensor] | None:
        if lanes is None:
            return None
        one = lanes[0].tensors.get((pair.expected.batch, pair.expected.step, 0))
        other = lanes[1].tensors.get((pair.actual.batch, pair.actual.step, 0))
        if one is None or other is None or not (one.has_values and other.has_values):
            return None
        return expected.read(one), actual.read(other)

    return read


def _dtypes(matching: Matching) -> list[str]:
    return [lane.first.dtype for pair in matching.pairs for lane in pair]


def _activation_dtype(dump: Dump) -> str:
    """Return the dtype of most floating-point activations."""
    counts = Counter(
        one.dtype
        for one in dump.tensors
        if one.dtype in FORMATS and not one.site.port.startswith("parameter.")
    )
    return counts.most_common(1)[0][0] if counts else "float32"


def _read_map(path: str | None) -> Mapping[str, str]:
    """Read --map: a TOML or JSON table of expected to actual module names."""
    if path is None:
        return {}
    file = Path(path).expanduser()
    table = read_json_object(file) if file.suffix == ".json" else read_toml(file)
    names = {str(key): value for key, value in table.items() if isinstance(value, str)}
    if len(names) != len(table):
        raise DumpError(f"{path} holds more than pairs of module names")
    return names
