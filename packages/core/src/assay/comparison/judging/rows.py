"""The rows of files: measurements of places, errors of single tokens for a report, the table of all tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

from assay.comparison.judging.judged_ports import JudgedPort
from assay.comparison.measured_dumps import MeasuredDumps
from assay.comparison.measuring.pair_values import PairMetrics, TensorPair
from assay.comparison.pairing.port_series import Port, SeriesByPort
from assay.dumps.protocol import DumpedTensor
from assay.judge.levels import find_worst
from assay.judge.token_rows import MAX_TOKEN_ROWS, TokenPort, TokenRows
from assay.output.tables import Cell, Table
from assay.sites import Site
from assay.verdicts import Measurement, Outcome, Ratio

_IN_BLOCK = re.compile(r"\.\d+(\.|$)")


def list_measurements(judged: Iterable[JudgedPort], only: str = "") -> Iterator[Measurement]:
    """Yield the rows of measurements.jsonl. only: the one statistic that is wanted, if any."""
    for one in judged:
        place = {"phase": one.port.phase, "order": one.order, "rank": one.result.rank}
        for item in one.ratios:
            if only in ("", item.statistic):
                yield item.measurement(one.port.level, one.port.name, one.port.module, **place)


def list_tokens(
    dumps: MeasuredDumps, judged: Sequence[JudgedPort]
) -> tuple[Iterable[Measurement], list[str]]:
    """Return a row for every token at every module output, and a note on omitted rows.

    Large dumps keep outer modules, and some of the tokens.
    """
    outputs = [
        one for one in judged if one.port.direction == "output" and one.port.level == "modules"
    ]
    kept = _keep_outer(outputs)
    steps = {
        (prompt, position): pair.expected.step
        for pair in dumps.pairing.alignment.pairs
        if pair.expected.rows is not None
        for prompt, positions in zip(
            pair.expected.rows.prompts, pair.expected.rows.positions, strict=True
        )
        for position in positions
    }
    ports = [_token_port(dumps, one) for one in kept]
    rows = TokenRows(ports, lambda *token: steps.get(token, 0), MAX_TOKEN_ROWS)
    is_bounded = len(kept) < len(outputs) or rows.is_bounded
    note = (
        "errors of single tokens are kept for the outer modules and for the"
        f" {len(rows.kept):,} tokens with the largest ones; all were judged"
    )
    return rows, [note] if rows.kept and is_bounded else []


def _keep_outer(outputs: Sequence[JudgedPort]) -> list[JudgedPort]:
    """Return the outputs of the outer modules: all blocks, and inner modules if they fit."""
    kept: list[JudgedPort] = []
    has_blocks = False
    for depth in sorted({_depth(one) for one in outputs}):
        level = [one for one in outputs if _depth(one) == depth]
        num_rows = sum(len(part.prompt) for one in (*kept, *level) for part in one.result.sums.rows)
        if has_blocks and num_rows > MAX_TOKEN_ROWS:
            break
        kept += level
        has_blocks = has_blocks or any(_IN_BLOCK.search(one.port.module) for one in level)
    return sorted(kept, key=lambda one: one.order)


def _depth(judged: JudgedPort) -> int:
    return judged.port.module.count(".")


def _token_port(dumps: MeasuredDumps, judged: JudgedPort) -> TokenPort:
    port, noise = judged.port, dumps.noise
    of_port = noise.of(port) if noise is not None else []
    measured = [one for one in of_port if one.step == judged.result.step]
    place = {"level": "modules", "module": port.module, "port": port.name, "phase": port.phase,
             "order": judged.order, "rank": judged.result.rank}  # fmt: skip
    if measured:
        floor = dumps.pairing.unit_roundoff / 2
        return TokenPort(judged.result, measured[0].sums.rows, floor, place)
    return TokenPort(judged.result, None, judged.expected_noise, place)


_METRICS = tuple(one.name for one in fields(PairMetrics))

COLUMNS = (
    "order", "module", "port", "phase", "rank", "step", "batch",
    "expected_name", "expected_shape", "expected_dtype",
    "actual_name", "actual_shape", "actual_dtype",
    *_METRICS,
    "statistic", "noise_ratio", "limit", "verdict", "reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    """One pair, or one tensor without a partner."""

    place: tuple[int, int]
    """Position in network order."""
    port: Port
    expected: DumpedTensor | None
    actual: DumpedTensor | None
    reason: str
    measured: TensorPair | None = None


def make_table(
    pairs: Sequence[TensorPair], expected: SeriesByPort, actual: SeriesByPort, judged: Iterable[JudgedPort],
    custom: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Return one row for each pair, and for each tensor without a partner.

    expected, actual: all selected ports of both dumps.
    custom: names of the custom metrics.
    """
    places: dict[tuple[Port, int | None, int], JudgedPort] = {}
    for one in judged:
        places.setdefault((one.port, None, one.result.step), one)
        places[one.port, one.result.rank, one.result.step] = one
    rows: list[list[Cell]] = []
    for row in sorted(_collect(pairs, expected, actual), key=lambda row: row.place):
        sites = [one.site.at for one in (row.expected, row.actual) if one is not None]
        at, rank = sites[0], sites[-1].rank
        metrics = row.measured.metrics if row.measured else None
        found = row.measured.custom if row.measured else []
        # Steps of a generation are judged together, training steps one by one.
        keys = [(row.port, of_rank, step) for step in (at.step, 0) for of_rank in (rank, None)]
        rows.append([
            len(rows), row.port.module, row.port.name, at.phase, rank, at.step, at.micro_batch,
            *_describe(row.expected), *_describe(row.actual),
            *(astuple(metrics) if metrics else [None] * len(_METRICS)),
            *_judge(row, next((places[key] for key in keys if key in places), None)),
            *([cell for pair in found for cell in pair] or [None] * (2 * len(custom))),
        ])  # fmt: skip
    names = [name for one in custom for name in (one, f"{one}_message")]
    return Table((*COLUMNS, *names), rows)


def _collect(
    pairs: Sequence[TensorPair], expected: SeriesByPort, actual: SeriesByPort
) -> list[_Row]:
    """Return the rows of all pairs, then of the tensors without a partner.

    A tensor of ACTUAL alone follows its predecessor in ACTUAL.
    """
    place_of = {_address(one): place for place, (one, _) in enumerate(_in_order(expected))}
    rows = [
        _Row((place_of[_address(one.expected)], number), one.port, one.expected,
             one.actual, one.reason, one)
        for number, one in enumerate(pairs)
    ]  # fmt: skip
    partners = {_address(row.actual): row.place[0] for row in rows}
    paired = {_address(row.expected) for row in rows}
    repeated = {row.port for row in rows if row.port.direction == "parameter"}
    reasons = dict.fromkeys(repeated, "repeated: a parameter is compared once per step")
    for place, (tensor, port) in enumerate(_in_order(expected)):
        if _address(tensor) not in paired:
            reason = reasons.get(port, "no partner in ACTUAL")
            rows.append(_Row((place, -1), port, tensor, None, reason))
    place = -1
    for number, (tensor, port) in enumerate(_in_order(actual), len(pairs)):
        place = partners.get(_address(tensor), place)
        if _address(tensor) not in partners:
            reason = reasons.get(port, "no partner in EXPECTED")
            rows.append(_Row((place, number), port, None, tensor, reason))
    return rows


def _address(tensor: DumpedTensor | None) -> tuple[Site, str] | None:
    return (tensor.site, tensor.key) if tensor is not None else None


def _in_order(series_of: SeriesByPort) -> list[tuple[DumpedTensor, Port]]:
    found = [
        (tensor, series.port)
        for series in series_of.values()
        for tensors in series.tensors.values()
        for tensor in tensors
    ]
    return sorted(found, key=lambda item: item[0].order)


def _describe(tensor: DumpedTensor | None) -> tuple[Cell, Cell, Cell]:
    if tensor is None:
        return None, None, None
    shape = None if tensor.shape is None else str(list(tensor.shape))
    return tensor.key, shape, tensor.dtype or None


def _judge(row: _Row, place: JudgedPort | None) -> tuple[Cell, ...]:
    """Return the deciding statistic, ratio and limit, the verdict, and the reason."""
    if row.reason:
        return None, None, None, Outcome.NOT_COMPARED.value, row.reason
    if place is None:
        return (None,) * 5
    ratios = [_of_row(row, one) for one in place.ratios]
    worst = find_worst(ratios)
    verdict = Outcome.FAIL if any(one.failed for one in ratios) else Outcome.PASS
    return worst.statistic, worst.value, worst.limit, verdict.value, None


def _of_row(row: _Row, judged: Ratio) -> Ratio:
    """Return the ratio of one tensor, as far as its metrics show it; else that of all steps."""
    metrics = row.measured.metrics if row.measured else None
    if metrics is None:
        return judged
    distance = metrics.relative_euclidean_distance
    if not distance and metrics.cosine_similarity < 0.5:  # noqa: PLR2004 - published: from zeros it is 0
        distance = math.nan
    has_nonfinite = metrics.num_nonfinite_actual > metrics.num_nonfinite_expected
    is_equal = distance == 0 and not has_nonfinite
    values = {
        "accumulated": distance,
        "cosine-distance": 1 - metrics.cosine_similarity,
        "kl-divergence": metrics.kl_divergence,
    }
    value = 0.0 if is_equal else values.get(judged.statistic, math.nan)
    return judged if math.isnan(value) else replace(judged, actual=value)
