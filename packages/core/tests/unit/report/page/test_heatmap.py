"""The cells of the heat map, and what it leaves out."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.report.page import heatmap
from assay.report.page.heatmap import draw_heat_map
from assay.report.page.table import draw_table
from assay.report.run_report import Report
from assay.verdicts import Location, Measurement, Outcome, Verdict


def cell(module: str, position: int, ratio: float, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "statistic": "token",
        "order": ord(module[0]) if module else 0, "prompt": 0, "position": position,
        "actual": 0.01 * ratio, "expected": 0.01, "ratio": ratio,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def report_of(*rows: Measurement, location: Location | None = None) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL, location=location), list(rows))


def ratios(found: heatmap.HeatMap) -> list[list[float | None]]:
    width = len(found.columns)
    values = [item.ratio if item else None for item in found.cells]
    return [values[start : start + width] for start in range(0, len(values), width)]


def test_lines_follow_the_forward_pass_and_columns_the_tokens() -> None:
    found = draw_heat_map(
        report_of(cell("b", 1, 4.0), cell("a", 1, 2.0), cell("a", 0, 1.0), cell("b", 0, 3.0))
    )
    assert found is not None
    assert [stage.label for stage in found.stages] == ["a", "b"]
    assert [column.label for column in found.columns] == [
        "prompt 0, token 0",
        "prompt 0, token 1",
    ]
    assert ratios(found) == [[1.0, 2.0], [3.0, 4.0]]


def test_token_that_was_not_compared_is_absent_and_not_zero() -> None:
    found = draw_heat_map(report_of(cell("a", 0, 1.0), cell("b", 1, 2.0)))
    assert found is not None
    assert ratios(found) == [[1.0, None], [None, 2.0]]


def test_worst_port_of_a_cell_is_shown_with_its_own_values() -> None:
    found = draw_heat_map(
        report_of(cell("a", 0, 5.0, port="output.1"), cell("a", 0, 3.0, port="output.0"))
    )
    assert found is not None
    shown = found.cells[0]
    assert shown is not None
    assert (shown.port, shown.actual, shown.expected) == ("output.1", 0.05, 0.01)


def test_worst_cell_is_found_and_nan_is_worst() -> None:
    rows = [cell("a", 0, 1.0), cell("a", 1, 1e30), cell("b", 0, 2.0), cell("b", 1, math.nan)]
    found = draw_heat_map(report_of(*rows))
    assert found is not None
    assert found.worst == 3
    assert found.top == 1e30


def test_clean_run_is_not_drawn_in_alarming_colours() -> None:
    found = draw_heat_map(report_of(cell("a", 0, 1.2)))
    assert found is not None
    assert found.top == 10.0


def test_located_stage_is_marked_by_module_and_phase() -> None:
    rows = [cell("", 0, 1.0), cell("", 0, 9.0, phase="inputs", order=-1)]
    found = draw_heat_map(report_of(*rows, location=Location(phase="inputs")))
    assert found is not None
    assert [stage.label for stage in found.stages] == ["(model) (inputs)", "(model)"]
    assert found.located == 0


def test_columns_carry_prompts_and_tokens_for_their_headings() -> None:
    found = draw_heat_map(
        report_of(cell("a", 3, 1.0), cell("a", 7, 1.0), cell("a", 2, 1.0, prompt=1))
    )
    assert found is not None
    packed = found.packed()
    assert packed["prompts"] == [0, 0, 1]
    assert packed["tokens"] == [[3, 3], [7, 7], [2, 2]]


def test_a_comparison_of_dumps_names_the_judged_side_actual() -> None:
    report = report_of(cell("a", 0, 1.0))
    dumps = replace(
        report, verdict=report.verdict.model_copy(update={"candidate": {"format": "msprobe"}})
    )
    for one, side in (report, "candidate"), (dumps, "ACTUAL"):
        found = draw_heat_map(one)
        assert found is not None
        assert found.packed()["judgedSide"] == side
        assert draw_table(one).judged_side == side
    assert list(dumps.facts) == ["ACTUAL"]


def test_prompts_and_decode_steps_are_distinguished() -> None:
    found = draw_heat_map(report_of(cell("a", 0, 1.0, prompt=1), cell("a", 7, 1.0, step=3)))
    assert found is not None
    assert [column.label for column in found.columns] == [
        "prompt 0, token 7 (decode step 3)",
        "prompt 1, token 0",
    ]


def test_adjacent_tokens_are_pooled_by_their_worst_and_it_is_stated() -> None:
    rows = [cell("a", position, float(position)) for position in range(5)]
    rows += [cell("a", 0, 9.0, prompt=1)]
    found = draw_heat_map(report_of(*rows), max_cells=4)
    assert found is not None
    assert ratios(found) == [[1.0, 3.0, 4.0, 9.0]]
    assert [column.label for column in found.columns][:3] == [
        "prompt 0, tokens 0 to 1",
        "prompt 0, tokens 2 to 3",
        "prompt 0, token 4",
    ]
    assert found.statements == ["One place is the worst of up to 2 adjacent tokens."]


def test_modules_with_the_lowest_ratios_are_left_out_and_it_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heatmap, "MAX_STAGES", 2)
    rows = [cell("a", 0, 3.0), cell("b", 0, 1.5), cell("c", 0, 8.0)]
    found = draw_heat_map(report_of(*rows))
    assert found is not None
    assert [stage.label for stage in found.stages] == ["a", "c"]
    assert found.statements == [
        (
            "2 of 3 modules are shown, those with the highest ratios; "
            "the highest ratio left out is 1.5x."
        )
    ]


def test_prompts_with_the_lowest_ratios_are_left_out_and_it_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heatmap, "MAX_PROMPTS", 1)
    rows = [cell("a", 0, 3.0), cell("a", 0, 8.0, prompt=1)]
    found = draw_heat_map(report_of(*rows))
    assert found is not None
    assert ratios(found) == [[8.0]]
    assert found.statements == [
        (
            "1 of 2 prompts are shown, those with the highest ratios; "
            "the highest ratio left out is 3.0x."
        )
    ]


def test_rows_of_other_statistics_and_levels_are_no_cells() -> None:
    rows = [cell("a", 0, 1.0, statistic="replay-tensor"), cell("a", 0, 1.0, level="logits")]
    assert draw_heat_map(report_of(*rows)) is None
