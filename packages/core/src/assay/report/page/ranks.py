"""The ranks of a run, each with its worst place and its worst row in each layer."""

from dataclasses import dataclass

from assay.comparing.wording.deciding_rows import find_worst_rows, over_limit
from assay.report.page.charts import keep_worst, layer_of
from assay.report.run_report import Report
from assay.verdicts import Measurement

MAX_RANKS = 64
MAX_LAYERS = 128


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
    judged = [row for row in report.measurements if row.limit is not None]
    of_rank = find_worst_rows((row.rank, row) for row in judged)
    if len(of_rank) < 2:
        return None
    in_layers = [(layer, row) for row in judged if (layer := layer_of(row.module)) is not None]
    of_layer = find_worst_rows(in_layers)
    cells = find_worst_rows(((row.rank, layer), row) for layer, row in in_layers)
    statements: list[str] = []
    ranks = sorted(keep_worst(_severities(of_rank), MAX_RANKS, "ranks", statements))
    layers = sorted(keep_worst(_severities(of_layer), MAX_LAYERS, "layers", statements))
    lines = [
        RankLine(rank, of_rank[rank], [cells.get((rank, layer)) for layer in layers])
        for rank in ranks
    ]
    return RankTable(layers, lines, statements)


def _severities(worst: dict[int, Measurement]) -> dict[int, float]:
    return {key: over_limit(row) for key, row in worst.items()}
