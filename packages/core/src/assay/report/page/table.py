"""The table of measurements, which the reader can sort and filter."""

from dataclasses import dataclass

from assay.comparing.explain import rank_of, shown_ratio
from assay.comparing.wording import format_number
from assay.report.page.packing import pack_labels, pack_numbers
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
