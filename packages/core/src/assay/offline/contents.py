"""The contents of a dump, and signs that it does not hold a whole run: a cut-off end, lost ranks, reused buffers."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from assay.comparing.wording import format_count
from assay.dumps.protocol import Dump, DumpedTensor
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.files import UnreadableFileError
from assay.foreign_text import one_line
from assay.offline.pairing.alignment import find_passes
from assay.offline.pairing.passes import Pass
from assay.offline.pairing.port_series import Port, Series, SeriesByPort, collect_series
from assay.progress import subtask

_NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a dump, for people and programs."""

    format: str
    path: str
    tensors: int
    size_bytes: int
    statistics_only: bool
    ranks: list[int]
    passes: list[str]
    modules: int
    by_level: dict[str, int]
    dtypes: dict[str, int]
    provenance: dict[str, str]
    problems: list[str]
    damaged: list[str]
    """Errors of the files that cannot be read."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def to_lines(self) -> list[str]:
        """Return the lines that the command prints."""
        kind = format_count(self.tensors, "tensor")
        kind += " (statistics, no values)" if self.statistics_only else ""
        lines = [
            f"{self.format} dump {self.path}",
            f"  {kind}, {self.size_bytes / 1e6:,.1f} MB, {format_count(self.modules, 'module')}",
            f"  levels: {_counts(self.by_level)}",
            f"  dtypes: {_counts(self.dtypes)}",
            f"  ranks: {', '.join(map(str, self.ranks))}",
            f"  passes ({len(self.passes)}): {name_some(self.passes, _NUM_SHOWN)}",
        ]
        lines += [f"  {name}: {value}" for name, value in self.provenance.items()]
        lines += [f"  missing: {problem}" for problem in self.problems]
        lines += [f"  damaged: {problem}" for problem in self.damaged]
        return [one_line(line) for line in lines]


def describe_contents(path: str, format_name: str | None = None) -> Contents:
    """Open a dump, count its contents, and read every tensor once.

    Raises: DumpError or UnreadableFileError if it cannot be opened.
    """
    dump = open_dump(path, format_name)
    series_of = collect_series(dump)
    return Contents(
        dump.format,
        dump.name,
        len(dump.tensors),
        sum(one.size_bytes for one in dump.tensors),
        bool(dump.tensors) and not any(one.has_values for one in dump.tensors),
        dump.ranks,
        [str(one) for one in find_passes(dump)],
        len({port.module for port in series_of}),
        dict(Counter(port.level for port in series_of)),
        dict(Counter(one.dtype or "unknown" for one in dump.tensors)),
        dict(dump.provenance),
        list(dump.problems),
        _find_damaged(dump),
    )


def _find_damaged(dump: Dump) -> list[str]:
    errors: dict[str, None] = {}
    stored = [one for one in dump.tensors if one.has_values]
    with subtask(f"reads {dump.name}", sum(one.size_bytes for one in stored), "bytes") as task:
        for tensor in stored:
            try:
                tensor.read()
            except UnreadableFileError as error:
                errors[str(error)] = None
            task.advance(tensor.size_bytes)
    return list(errors)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def find_cut_off(dump: Dump) -> list[str]:
    """Return a problem for each rank whose last pass ends before the point where earlier passes end.

    An evaluation after training has no backward, so it ends early too. A dump that records its end is exempt,
    and so is one without an order.
    """
    if dump.is_finished or not dump.is_ordered:
        return []
    by_rank: dict[int, list[DumpedTensor]] = {}
    for tensor in sorted(dump.tensors, key=lambda one: one.order):
        by_rank.setdefault(tensor.site.at.rank, []).append(tensor)
    return [
        f"the run was cut off in {f'rank {at.rank}, ' if at.rank else ''}step {at.step}: its last"
        f" results are those of {at.module or '(model)'}"
        for tensors in by_rank.values()
        if _is_cut_off(tensors)
        for at in [tensors[-1].site.at]
    ]


def _is_cut_off(tensors: list[DumpedTensor]) -> bool:
    passes: dict[tuple[int, int], dict[Port, None]] = {}
    for one in tensors:
        at = one.site.at
        ports = passes.setdefault((at.micro_batch, at.step), {})
        ports[Port(at.module, one.site.port, at.phase)] = None
    at = tensors[-1].site.at
    last = passes.pop((at.micro_batch, at.step))
    if not passes:
        return at.phase == "forward" and _is_inside_unfinished(at.module, last)
    before = list(passes[list(passes)[-1]])
    missing = [port for port in before if port not in last]
    return 0 < len(missing) < len(before) and before[-len(missing) :] == missing


def _is_inside_unfinished(module: str, ports: dict[Port, None]) -> bool:
    """Return True if a block around a module has no output, and a similar block has one."""
    finished = {port.module for port in ports if port.direction == "output"}
    kinds = {re.sub(r"\d+", "*", one) for one in finished}
    parts = module.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(one not in finished and re.sub(r"\d+", "*", one) in kinds for one in around)


_KINDS = {
    "parameter": "parameters", "changed": "values that calls change in place", "op": "operations",
    "input": "arguments", "output": "results", "update": "parameter updates",
}  # fmt: skip


def list_unrecorded(
    expected: SeriesByPort, actual: SeriesByPort, missing: Sequence[str]
) -> list[str]:
    """Describe kinds of tensors that ACTUAL never holds, with the option that excuses their absence.

    missing: names of expected tensors without a partner.
    """
    if missing and not any(port.module for port in actual if port.level != "logits"):
        return ["ACTUAL holds nothing of single modules: --level logits compares what both hold"]
    held = {port.direction for port in actual}
    lacking = dict.fromkeys(port.direction for port in expected if port.direction not in held)
    return [
        f"ACTUAL holds no {_KINDS.get(kind, kind)}: --allow-unmatched '*:{kind}*' excuses them"
        for kind in lacking
        if any(f":{kind}" in name for name in missing)
    ]


# The values of this many ports are read. The majority decides.
_MOST_PLACES = 9


def find_lost_ranks(expected: Dump, actual: Dump) -> set[int]:
    """Return the ranks that only EXPECTED holds, if the other ranks hold the same parts on both sides.

    A run on fewer ranks holds whole tensors, sums or larger parts instead.
    """
    kept, lost = set(actual.ranks), set(expected.ranks) - set(actual.ranks)
    if not lost or not kept <= set(expected.ranks):
        return set()
    votes: list[bool] = []
    others = collect_series(actual)
    for port, series in collect_series(expected).items():
        # The first call, on all ranks.
        both = [next(iter(one.tensors.values())) for one in (series, others.get(port)) if one]
        if len(both) < 2 or len(both[0]) <= len(both[1]):
            continue
        shapes = {one.site.at.rank: one.shape for one in both[0]}
        if any(one.shape != shapes.get(one.site.at.rank) for one in both[1]):
            return set()
        if len(votes) < _MOST_PLACES and "float" in series.first.dtype:
            votes += _vote(both[0], both[1])
    return lost if sum(votes) * 2 > len(votes) else set()


def _vote(parts: Sequence[DumpedTensor], others: Sequence[DumpedTensor]) -> list[bool]:
    """Return [True] if a value is nearer to the value of its own rank than to the sum; [] for replicas."""
    values = {
        one.site.at.rank: value.double()
        for one in parts
        if (value := one.read_intact()) is not None
    }
    other = others[0].read_intact()
    if other is None or len(values) < len(parts):
        return []
    if len({one.shape for one in values.values()}) > 1:
        return [True]
    own = values[others[0].site.at.rank]
    if all(torch.equal(one, own) for one in values.values()):
        return []
    total = torch.stack([*values.values()]).sum(0)
    return [_distance(other.double(), own) < _distance(other.double(), total)]


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other))


# One module, such as a saturated gate, may compute equal values from different inputs. Three do not.
_FEWEST_MODULES = 3
# An output with fewer distinct values may be constant by nature, such as zeros or a one-hot choice.
_FEWEST_VALUES = 5

_Pair = tuple[Pass, Pass]


def find_reused_buffers(dump: Dump) -> list[DumpedTensor]:
    """Return the outputs that are bitwise equal in decode steps with different tokens or inputs.

    A captured graph writes every step to the same memory. A tool that keeps references, or that records
    only during capture, then dumps one step under the names of all steps.

    To save time, only the first and last pair of decode steps of each request are searched.
    """
    series_of = {
        port: series for port, series in collect_series(dump).items() if port.phase == "forward"
    }
    outputs = [
        series
        for port, series in series_of.items()
        if port.direction == "output" and "float" in series.first.dtype
    ]
    found: dict[str, DumpedTensor] = {}
    for pairs in _list_decode_pairs(find_passes(dump)):
        telling = [pair for pair in pairs if _have_different_ids(*pair)] or pairs
        for one, other in dict.fromkeys((*telling[:1], *telling[-1:])):
            repeated = [series for series in outputs if _is_same(series, one, other)]
            if repeated and _is_evidence(series_of, (one, other), repeated):
                steps = dict.fromkeys(each for pair in pairs for each in pair)
                for series in repeated:
                    same = [each for each in steps if _is_same(series, each, other)]
                    found |= {
                        str(held.site): held for each in same for held in series.held_in(each)
                    }
    return list(found.values())


def describe_reused(reused: Sequence[DumpedTensor]) -> list[str]:
    """Return one problem for all reused buffers, or an empty list."""
    if not reused:
        return []
    steps = sorted({one.site.at.step for one in reused})
    modules = list(dict.fromkeys(one.site.at.module or "(model)" for one in reused))
    text = (
        f"the same values in steps {', '.join(map(str, steps))}, though their tokens differ: a buffer was"
        f" reused, as by a captured graph ({format_count(len(modules), 'module')}: {name_some(modules)})"
    )
    return [text]


def _list_decode_pairs(passes: Sequence[Pass]) -> Iterator[list[_Pair]]:
    """Yield the pairs of successive decode steps of each request."""
    pairs: list[_Pair] = []
    has_begun = False
    for one, following in pairwise(passes):
        lengths = [each.rows.length if each.rows else 0 for each in (one, following)]
        if one.batch != following.batch or lengths[1] != 1:
            yield pairs
            pairs, has_begun = [], False
        elif lengths[0] > 1:
            has_begun = True
        elif has_begun and one.shape == following.shape:
            pairs.append((one, following))
    yield pairs


def _have_different_ids(one: Pass, other: Pass) -> bool:
    return one.ids is not None and other.ids is not None and not torch.equal(one.ids, other.ids)


def _is_same(series: Series, one: Pass, other: Pass, fewest_values: int = _FEWEST_VALUES) -> bool:
    """Return True if a port holds equal values in two passes on all ranks."""
    sides = series.held_in(one), series.held_in(other)
    return len(sides[0]) == len(sides[1]) > 0 and all(
        _are_equal(*both, fewest_values) for both in zip(*sides, strict=True)
    )


def _are_equal(one: DumpedTensor, other: DumpedTensor, fewest_values: int) -> bool:
    if one.shape != other.shape or one.has_values != other.has_values:
        return False
    if not one.has_values:
        known = one.statistics
        return known == other.statistics and known.get("max") != known.get("min")
    return one.holds_equal(other) and len(one.read().double().unique()) >= fewest_values


def _is_evidence(series_of: SeriesByPort, pair: _Pair, repeated: Sequence[Series]) -> bool:
    """Return True if several modules, or the logits, have equal results for different inputs."""
    have_different_ids = _have_different_ids(*pair)
    if have_different_ids and any(series.port.level == "logits" for series in repeated):
        return True
    found = set()
    for series in repeated:
        inputs = [
            other
            for port, other in series_of.items()
            if (port.module, port.direction) == (series.port.module, "input")
            and other.held_in(pair[0])
        ]
        # If its inputs repeat too, as in an encoder, a module rightly repeats its result.
        is_explained = all(_is_same(one, *pair, fewest_values=0) for one in inputs)
        if not is_explained or (have_different_ids and not inputs):
            found.add(series.port.module)
    if len(found) >= _FEWEST_MODULES:
        return True
    # Attention sees one more token in each step, so some result must differ.
    modules = {series.port.module for series in repeated}
    return (
        len(modules) >= _FEWEST_MODULES
        and any("att" in module.lower() for module in modules)
        and all(
            _is_same(series, *pair, fewest_values=0)
            for port, series in series_of.items()
            if port.direction == "output" and series.held_in(pair[0])
        )
    )
