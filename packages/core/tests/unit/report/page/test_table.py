"""Which measurements the table lists."""

import math
from pathlib import Path
from typing import Any

from assay.report.page.table import draw_table
from assay.report.run_report import Report
from assay.verdicts import Measurement, Outcome, Verdict


def measured(ratio: float, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": "a", "port": "output", "statistic": "token",
        "actual": 0.02, "expected": 0.01, "ratio": ratio,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def report_of(*rows: Measurement) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL), list(rows))


def test_rows_begin_with_the_highest_ratio_and_nan() -> None:
    broken = measured(math.nan, actual=math.nan)
    table = draw_table(report_of(measured(1.0), broken, measured(5.0)))
    assert [str(row.ratio) for row in table.rows] == ["nan", "5.0", "1.0"]
    assert table.statements == []


def test_values_without_a_ratio_come_last_and_show_none() -> None:
    table = draw_table(report_of(measured(math.nan), measured(1.0)))
    assert [str(row.ratio) for row in table.rows] == ["1.0", "nan"]
    columns: Any = table.packed()["columns"]
    ratio = next(column for column in columns if column["title"] == "ratio")
    assert [ratio["labels"][code] for code in ratio["codes"]] == ["1.0", None]


def test_judged_rows_are_kept_before_higher_ones_that_were_not() -> None:
    rows = [measured(9.0), measured(0.5, limit=3.0), measured(8.0)]
    table = draw_table(report_of(*rows), max_rows=2)
    assert [row.ratio for row in table.rows] == [9.0, 0.5]
    assert table.statements == [
        (
            "2 of 3 measurements are listed: those that were judged, then those with the highest "
            "ratios; the highest ratio left out is 8.0x."
        )
    ]


def test_every_field_of_a_measurement_is_a_column() -> None:
    packed: dict[str, Any] = draw_table(report_of(measured(1.0))).packed()
    titles = [column["title"] for column in packed["columns"]]
    renamed = {"actual": "candidate", "expected": "noise", "position": "token"}
    # The order of a stage is that of the pictures, which means nothing in a table.
    fields = set(Measurement.model_fields) - {"order"}
    assert set(titles) == {renamed.get(name, name) for name in fields}
    assert packed["count"] == 1
