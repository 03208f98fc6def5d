"""The ranks of a run, with the worst of each layer."""

from pathlib import Path

import pytest

from assay.report.page import worst_places
from assay.report.page.worst_places import draw_ranks
from assay.report.run_report import Report
from assay.verdicts import Measurement, Outcome, Verdict


def row(module: str, rank: int, ratio: float, limit: float | None = 2.0) -> Measurement:
    return Measurement(
        level="modules", module=module, port="output", statistic="accumulated", rank=rank,
        actual=ratio, expected=1.0, ratio=ratio, limit=limit,
    )  # fmt: skip


def report_of(*rows: Measurement) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL), list(rows))


ROWS = [
    row("embed", 0, 0.5), row("layers.0.up", 0, 1.0), row("layers.1.up", 0, 1.5),
    row("layers.1.down", 0, 0.2), row("model.layers.1.up", 1, 8.0), row("embed", 1, 0.1),
]  # fmt: skip


def test_each_rank_has_its_worst_place_and_the_worst_of_each_layer() -> None:
    found = draw_ranks(report_of(*ROWS))
    assert found is not None
    assert found.layers == [0, 1]
    assert [(line.rank, line.worst.module) for line in found.lines] == [
        (0, "layers.1.up"), (1, "model.layers.1.up")
    ]  # fmt: skip
    cells = [[one.ratio if one else None for one in line.layers] for line in found.lines]
    assert cells == [[1.0, 1.5], [None, 8.0]]


def test_one_rank_and_rows_that_are_not_judged_make_no_view() -> None:
    assert draw_ranks(report_of(*ROWS[:4], row("embed", 1, 9.0, limit=None))) is None


def test_ranks_with_the_lowest_ratios_are_left_out_and_it_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worst_places, "MAX_RANKS", 1)
    monkeypatch.setattr(worst_places, "MAX_LAYERS", 1)
    found = draw_ranks(report_of(*ROWS))
    assert found is not None
    assert [line.rank for line in found.lines] == [1]
    assert found.layers == [1]
    assert [text.partition(" are")[0] for text in found.statements] == [
        "1 of 2 ranks", "1 of 2 layers"
    ]  # fmt: skip
