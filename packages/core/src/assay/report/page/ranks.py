"""The ranks of a run, each with its worst place and its worst row in each layer."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from assay.comparing.wording.deciding_rows import over_limit
from assay.report.page.charts import layer_of
from assay.report.page.heatmap import keep_worst
from assay.report.run_report import Report
from assay.verdicts import Measurement

MAX_RANKS = 64
MAX_LAYERS = 128

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RankLine:
    """The line of one rank."""

    rank: int
    worst: Measurement
    layers: list[Measurement | None]
    """The worst row in each layer of the table; None without rows."""


@dataclass(frozen=True)
class RankTable:
    """One line for each rank, and statements about omissions."""

    layers: list[int]
    lines: list[RankLine]
    statements: list[str]


def draw_ranks(report: Report) -> RankTable | None:
    """Make the table of a run with several ranks; None for one rank.

    It leaves out the ranks and layers with the lowest ratio / limit if there are too many.
    """
    of_rank: dict[int, Measurement] = {}
    of_layer: dict[int, Measurement] = {}
    cells: dict[tuple[int, int], Measurement] = {}
    for row in report.measurements:
        if row.limit is None:
            continue
        _keep_worse(of_rank, row.rank, row)
        layer = layer_of(row.module)
        if layer is not None:
            _keep_worse(of_layer, layer, row)
            _keep_worse(cells, (row.rank, layer), row)
    if len(of_rank) < 2:
        return None
    statements: list[str] = []
    ranks = sorted(keep_worst(_severities(of_rank), MAX_RANKS, "ranks", statements))
    layers = sorted(keep_worst(_severities(of_layer), MAX_LAYERS, "layers", statements))
    lines = [
        RankLine(rank, of_rank[rank], [cells.get((rank, layer)) for layer in layers])
        for rank in ranks
    ]
    return RankTable(layers, lines, statements)


def _keep_worse(known: dict[_Key, Measurement], key: _Key, row: Measurement) -> None:
    if key not in known or over_limit(row) > over_limit(known[key]):
        known[key] = row


def _severities(worst: dict[int, Measurement]) -> dict[int, float]:
    return {key: over_limit(row) for key, row in worst.items()}
