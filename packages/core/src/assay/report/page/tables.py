"""Tables of a report: all measurements, the tree of modules, and the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from assay.judge.explain import over_limit, rank_of, shown_ratio
from assay.judge.wording import format_number
from assay.report.page.pictures import added_errors, keep_worst, layer_of, pack_labels, pack_numbers
from assay.report.run_report import Report
from assay.verdicts import Measurement

# Thirteen columns are about 14 bytes a row, compressed: 1.4 MB of the 7 MB of a report.
MAX_ROWS = 100_000


@dataclass(frozen=True)
class MeasurementTable:
    """The rows of the table, highest ratio first."""

    rows: list[Measurement]
    statements: list[str]
    judged_side: str = "candidate"

    def packed(self) -> dict[str, object]:
        """Return title and packed values of each column."""
        rows = self.rows
        columns: list[tuple[str, dict[str, object]]] = [
            ("level", pack_labels([row.level for row in rows])),
            ("module", pack_labels([row.module or "(model)" for row in rows])),
            ("port", pack_labels([row.port for row in rows])),
            ("statistic", pack_labels([row.statistic for row in rows])),
            ("ratio", pack_numbers([shown_ratio(row) for row in rows])),
            ("limit", pack_numbers([row.limit for row in rows])),
            (self.judged_side, pack_numbers([row.actual for row in rows])),
            ("noise", pack_numbers([row.expected for row in rows])),
            ("prompt", pack_labels([row.prompt for row in rows])),
            ("token", pack_labels([row.position for row in rows])),
            ("phase", pack_labels([row.phase for row in rows])),
            ("step", pack_labels([row.step for row in rows])),
            ("rank", pack_labels([row.rank for row in rows])),
        ]
        return {
            "count": len(rows),
            "columns": [{"title": title, **packed} for title, packed in columns],
        }


def draw_table(report: Report, max_rows: int = MAX_ROWS) -> MeasurementTable:
    """Keep at most `max_rows`: judged rows first, then those with the highest ratios."""
    kept = report.measurements
    statements: list[str] = []
    if len(kept) > max_rows:
        ranked = sorted(kept, key=lambda row: (row.limit is not None, rank_of(row)), reverse=True)
        kept = ranked[:max_rows]
        highest = format_number(max(map(rank_of, ranked[max_rows:])))
        statements.append(
            f"{len(kept):,} of {len(ranked):,} measurements are listed: those that were judged, then those"
            f" with the highest ratios; the highest ratio left out is {highest}x."
        )
    kept = sorted(kept, key=lambda row: (rank_of(row), row.limit is not None), reverse=True)
    return MeasurementTable(kept, statements, report.judged_side)


MAX_NODES = 4_000
MAX_DEPTH = 16  # deeper parts of a path stay in one name

Path = tuple[str, ...]


@dataclass
class Node:
    """A module, or a part of a path that several modules share."""

    name: str
    worst: Measurement
    """The worst judged row of the module and all that it contains."""
    children: dict[str, "Node"] = field(default_factory=dict)
    added: float | None = None
    """Error of the output beyond that of the inputs; None if either was not compared."""
    is_worst: bool = False
    is_open: bool = False

    @property
    def is_over(self) -> bool:
        """Return True if the worst row is over its limit."""
        return is_over_limit(self.worst)


@dataclass(frozen=True)
class ModuleTree:
    """The root of the tree, and statements about omissions."""

    root: Node
    statements: list[str]


def is_over_limit(row: Measurement) -> bool:
    """Return True for a judged row that failed."""
    return row.limit is not None and not row.ratio <= row.limit


def draw_tree(report: Report, max_nodes: int = MAX_NODES) -> ModuleTree | None:
    """Draw the tree of all modules with judged rows; None without any.

    It is open along the path to the verdict's location, or at its first two levels in a clean run.
    It leaves out the modules with the lowest ratios if there are too many.
    """
    worst = _worst_of_subtrees(report)
    if len(worst) <= 1:
        return None
    # A subtree is as bad as its worst member, so that the parents of kept nodes are kept too.
    ranked = sorted(worst, key=lambda path: (-over_limit(worst[path]), len(path)))
    kept = set(ranked[:max_nodes])
    nodes = _link_nodes({path: row for path, row in worst.items() if path in kept})
    for (module, _), added in added_errors(report).items():
        if _path(module) in nodes:
            nodes[_path(module)].added = added
    for path in _opened(report):
        if path in nodes:
            nodes[path].is_open = True
    text = f"{len(nodes):,} of {len(worst):,} modules are shown, those nearest to or over their limits."
    return ModuleTree(nodes[()], [text] if len(worst) > len(nodes) else [])


def _worst_of_subtrees(report: Report) -> dict[Path, Measurement]:
    """Return the row to report of each subtree by path, in the order of the network.

    The located module shows the ratio of the verdict, although another of its phases may be worse.
    """
    judged = [row for row in report.measurements if row.limit is not None]
    worst = report.decided.find_worst(
        (path[:depth], row)
        for row in sorted(judged, key=lambda row: row.order)
        for path in [_path(row.module)]
        for depth in range(len(path) + 1)
    )
    deciding, location = report.decided.deciding, report.verdict.location
    if deciding is not None and location is not None and location.module:
        worst[_path(location.module)] = deciding
    return worst


def _link_nodes(worst: dict[Path, Measurement]) -> dict[Path, Node]:
    """Make the nodes, parents first, and mark the worst child of each."""
    nodes: dict[Path, Node] = {}
    for path, row in worst.items():
        nodes[path] = Node(path[-1] if path else "(model)", row)
        if path:
            nodes[path[:-1]].children[path[-1]] = nodes[path]
    for node in nodes.values():
        if len(node.children) > 1 and over_limit(node.worst) > 0:
            max(node.children.values(), key=lambda one: over_limit(one.worst)).is_worst = True
    return nodes


def _path(module: str) -> Path:
    return tuple(module.split(".", MAX_DEPTH - 1)) if module else ()


def _opened(report: Report) -> Iterator[Path]:
    location = report.verdict.location
    path = _path(location.module or "") if location else ()
    yield from (path[:depth] for depth in range(max(len(path), 2)))


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
    of_rank = report.decided.find_worst((row.rank, row) for row in judged)
    if len(of_rank) < 2:
        return None
    in_layers = [(layer, row) for row in judged if (layer := layer_of(row.module)) is not None]
    of_layer = report.decided.find_worst(in_layers)
    cells = report.decided.find_worst(((row.rank, layer), row) for layer, row in in_layers)
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
