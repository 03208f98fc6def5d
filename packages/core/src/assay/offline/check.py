"""`assay compare`: reads two dumps, compares them, and writes the verdict."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from assay.comparing.limits import Limits, load_limits
from assay.comparing.wording import dumps as wording
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.files import read_json_object, read_toml
from assay.models.remote_code import RemoteCode
from assay.offline.judging import Evidence, judge_dumps
from assay.offline.locating import coarser_unit
from assay.offline.matching import is_allowed
from assay.offline.measuring import Measured
from assay.offline.mixed_passes import split_mixed_passes
from assay.offline.pairing import Pairing, PairingOptions, pair_dumps
from assay.offline.ranks import number_ranks
from assay.offline.replaying import Replayed, TrustedModel, replay_dump
from assay.offline.tokens import find_passes
from assay.runs import Progress
from assay.runs.results import write_results
from assay.sites import RecordedLevel
from assay.verdicts import Measurement, Verdict


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
    with progress.step("reads the indexes"):
        expected = open_dump(comparison.expected, comparison.format)
        actual = open_dump(comparison.actual, comparison.format)
        noise = open_dump(comparison.noise) if comparison.noise else None
    verdict, measurements = compare_dumps(comparison, expected, actual, noise, progress)
    return write_results(verdict, measurements, folder, comparison.command)


def compare_dumps(
    comparison: Comparison, expected: Dump, actual: Dump, noise: Dump | None, progress: Progress
) -> tuple[Verdict, list[Measurement]]:
    """Compare opened dumps. noise: the third dump, if there is one."""
    limits = load_limits(comparison.limits)
    options = PairingOptions(
        comparison.level, comparison.rank, comparison.token_shift, _read_map(comparison.name_map)
    )
    expected, expected_notes = _normalize(expected)
    actual, actual_notes = _normalize(actual)
    with progress.step("compares the dumps"):
        pairing = pair_dumps(expected, actual, options)
        measured = pairing.measure(by_statistics=comparison.stats)
    measured_noise = None
    if noise is not None:
        with progress.step("measures the noise"):
            measured_noise = pair_dumps(expected, _normalize(noise)[0], options).measure()
    replayed = None
    if comparison.model is not None:
        with progress.step(f"replays {actual.path} with {comparison.model}"):
            replayed = _replay(comparison, comparison.model, actual, limits)
    evidence = Evidence(
        ports=[pair.port for pair in pairing.matching.pairs],
        absent_masks={lane.port for lane in pairing.matching.absent_masks},
        measured=measured,
        noise=measured_noise,
        noise_origin=f"the noise of {noise.path}" if noise else wording.EXPECTED_NOISE,
        replayed=replayed,
        tokens=pairing.tokens,
        alignment=pairing.alignment,
        unit_roundoff=coarser_unit(pairing.dtypes),
        unmatched_expected=_list_unmatched(comparison, pairing, measured),
        unmatched_actual=pairing.matching.unmatched_actual,
        notes=[*expected_notes, *actual_notes, *pairing.notes, *_list_repeats(measured)],
        accepts_statistics=comparison.stats,
        problems=[f"{dump.path}: {text}" for dump in (expected, actual) for text in dump.problems],
    )
    verdict, measurements = judge_dumps(evidence, limits)
    sides = {"reference": _describe(expected), "candidate": _describe(actual)}
    return verdict.model_copy(update=sides), measurements


def _normalize(dump: Dump) -> tuple[Dump, list[str]]:
    """Give passes, batches and layers one numbering, whatever folders and ranks hold them."""
    dump, mixed = split_mixed_passes(dump)
    dump, notes = number_ranks(dump)
    return dump, [mixed, *notes] if mixed else notes


def _replay(comparison: Comparison, model: str, dump: Dump, limits: Limits) -> Replayed:
    passes = find_passes(dump, comparison.rank)
    trusted = TrustedModel(model, comparison.remote_code)
    return replay_dump(trusted, dump, passes, _activation_dtype(dump), limits)


def _list_unmatched(comparison: Comparison, pairing: Pairing, measured: Measured) -> list[str]:
    """Return what forbids a PASS because it has no partner."""
    missing = (f"tokens of {one}" for one in pairing.alignment.missing)
    names = (*pairing.matching.unmatched_expected, *measured.unpaired, *missing)
    return [name for name in names if not is_allowed(name, comparison.allow_unmatched)]


def _list_repeats(measured: Measured) -> list[str]:
    repeated = list(dict.fromkeys(measured.repeated))
    if not repeated:
        return []
    return [f"EXPECTED holds the same values twice in a pass: {name_some(repeated)}"]


def _describe(dump: Dump) -> dict[str, str]:
    return {"run": str(dump.path), "format": dump.format, **dump.provenance}


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
