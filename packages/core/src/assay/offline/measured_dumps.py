"""Normalization, pairing and measurement of two dumps, before they are judged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from assay.comparing import dump_wording as wording
from assay.comparing.limits import Limits, load_limits
from assay.dtypes import FORMATS
from assay.dumps.protocol import Dump, DumpedTensor, DumpError
from assay.errors import UsageError, name_some
from assay.files import read_json_object, read_lines, read_toml
from assay.metrics import NormSums, PairSums
from assay.offline.completeness import (
    describe_reused,
    find_cut_off,
    find_lost_ranks,
    find_reused_buffers,
)
from assay.offline.expected_noise import (
    coarser_unit,
    expected_score_noise,
    measured_score_noise,
)
from assay.offline.layouts.ranks import number_ranks
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.measuring.routing import Flip, ScoreNoise
from assay.offline.metrics.pair_metrics import CustomMetric, measure_pair
from assay.offline.metrics.published import measure_as_published, measure_metrics
from assay.offline.moving import join_later_calls, number_single_passes, split_mixed_passes
from assay.offline.options import CompareOptions
from assay.offline.pairing import Pairing, pair_dumps
from assay.offline.ports.lanes import Port
from assay.progress import Progress

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
    notes: list[str]
    """Notes on the numbering of passes, batches and layers."""
    reused: list[DumpedTensor]
    """Tensors of ACTUAL that hold the values of another step."""
    lost_ranks: set[int]

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
    expected = _take_order(expected, comparison.order)
    expected, expected_notes = _normalize(expected)
    actual, actual_notes = _normalize(actual)
    lost = find_lost_ranks(expected, actual) if comparison.rank is None else set()
    expected = replace(
        expected, tensors=[one for one in expected.tensors if one.site.at.rank not in lost]
    )
    expected = _leave_out_reused(expected)
    dtype = activation_dtype(actual)
    limits = _load_limits(comparison, dtype)
    unit = coarser_unit([activation_dtype(expected), dtype, expected.rounded_to])
    score_noise = expected_score_noise(unit)
    measured_noise = None
    if noise is not None:
        with progress.step("measures the noise"):
            measured_noise = measure_noise(comparison, expected, noise, name_map, score_noise)
        score_noise = measured_score_noise(measured_noise, score_noise)
    add_metrics = None
    if comparison.table is not None or limits.names_metrics:
        formulas = measure_as_published if comparison.compat else measure_metrics
        add_metrics = partial(measure_pair, formulas, custom)
    with progress.step("compares the dumps"):
        pairing = pair_dumps(expected, actual, comparison, name_map)
        if noise is None and (measured_noise := read_recorded_noise(pairing, dtype)) is not None:
            score_noise = measured_score_noise(measured_noise, score_noise)
        flips = pairing.find_flips(score_noise)
        measured = pairing.measure(
            flips=flips,
            flips_spread=noise is None,
            by_statistics=comparison.stats,
            sums=PairSums if noise is not None else NormSums,
            finds_coarse=True,
            add_metrics=add_metrics,
        )
    return MeasuredDumps(
        comparison, expected, actual, limits, pairing, measured, measured_noise, flips,
        [*expected_notes, *actual_notes], find_reused_buffers(actual), lost,
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
    pairing = pair_dumps(expected, _normalize(noise)[0], comparison, name_map)
    measured = pairing.measure(flips=pairing.find_flips(scores))
    _require_healthy(comparison, pairing, measured)
    return measured


def read_recorded_noise(pairing: Pairing, dtype: str) -> MeasuredPorts | None:
    """Return the noise of `dtype` recorded in EXPECTED; None if there is none."""
    measured = MeasuredPorts(sums=NormSums)
    for lanes in pairing.matching.pairs:
        for tensors in lanes.expected.tensors.values():
            for one in tensors:
                if (noise := one.noise.get(dtype)) is not None:
                    error, norm, num_elements = noise
                    step = one.site.at.step if pairing.expected.is_training else 0
                    result = measured.at(lanes.port, 0, step, torch.empty(0), one.class_name)
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


def _normalize(dump: Dump) -> tuple[Dump, list[str]]:
    """Give passes, batches and layers the same numbers in all folders and ranks."""
    dump, mixed = split_mixed_passes(join_later_calls(number_single_passes(dump)))
    dump, notes = number_ranks(dump)
    dump = replace(dump, problems=[*dump.problems, *find_cut_off(dump)])
    return dump, [mixed, *notes] if mixed else notes


def _leave_out_reused(dump: Dump) -> Dump:
    """Drop tensors that hold the values of another step, and report them as a problem."""
    reused = find_reused_buffers(dump)
    dropped = {one.site for one in reused}
    return replace(
        dump,
        tensors=[one for one in dump.tensors if one.site not in dropped],
        problems=[*dump.problems, *describe_reused(reused)],
    )


def activation_dtype(dump: Dump) -> str:
    """Return the dtype of most floating-point activations."""
    counts = Counter(
        one.dtype
        for one in dump.tensors
        if one.dtype in FORMATS and not one.site.port.startswith("parameter.")
    )
    return counts.most_common(1)[0][0] if counts else "float32"


def _take_order(dump: Dump, file: str | None) -> Dump:
    """Sort the tensors of a dump by the modules of --order.

    Raises: DumpError unless the file names exactly the modules of the dump.
    """
    if file is None:
        return dump
    lines = [line.strip() for _, line in read_lines(Path(file).expanduser())]
    places = {name: place for place, name in enumerate(lines)}
    modules = {one.site.at.module: None for one in dump.tensors}
    for problem, names in (
        ("lacks modules of", [one for one in modules if one not in places]),
        ("names modules that are not in", [one for one in places if one not in modules]),
    ):
        if names:
            raise DumpError(f"--order {file} {problem} {dump.name}: {name_some(names)}")
    tensors = sorted(dump.tensors, key=lambda one: places[one.site.at.module])
    tensors = [replace(one, order=number) for number, one in enumerate(tensors)]
    return replace(dump, tensors=tensors, is_ordered=True)


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
