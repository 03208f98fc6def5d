"""Curves along the depth and the tokens, the cells of the heat map, and their packed numbers."""

import base64
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from assay.judge.wording import format_number
from assay.report.page import pictures
from assay.report.page.pictures import (
    Curve,
    LogAxis,
    draw_curve,
    draw_depth,
    draw_heat_map,
    draw_kl,
    pack_data,
    pack_labels,
    pack_numbers,
)
from assay.report.page.tables import draw_table
from assay.report.run_report import Report
from assay.verdicts import Location, Measurement, Outcome, Verdict


def report_of(*rows: Measurement, location: Location | None = None) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL, location=location), list(rows))


def stage(module: str, order: int, statistic: str, actual: float, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "order": order,
        "statistic": statistic, "actual": actual, "expected": 0.001, "ratio": actual / 0.001,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def token(prompt: int, position: int, actual: float, expected: float = 0.01) -> Measurement:
    return Measurement(
        level="logits", module="", port="output.logits", statistic="kl", prompt=prompt,
        position=position, actual=actual, expected=expected, ratio=actual / expected,
    )  # fmt: skip


def test_logarithmic_axis_puts_equal_ratios_at_equal_distances() -> None:
    axis = LogAxis(1.0, 100.0)
    assert [axis.y(value) for value in (100.0, 10.0, 1.0)] == [0.0, 500.0, 1000.0]


def test_zero_lies_at_the_foot_and_what_is_not_finite_on_top() -> None:
    axis = LogAxis(1.0, 100.0)
    assert [axis.y(value) for value in (0.0, math.inf, math.nan)] == [1000.0, 0.0, 0.0]


def test_few_decades_are_divided_by_one_two_five() -> None:
    assert [tick.label for tick in LogAxis(0.9, 60.0).ticks()] == [
        "1.0", "2.0", "5.0", "10.0", "20.0", "50.0",
    ]  # fmt: skip


def test_less_than_a_decade_is_divided_by_every_digit() -> None:
    assert [tick.label for tick in LogAxis(0.9, 4.4).ticks()] == ["0.9", "1.0", "2.0", "3.0", "4.0"]


def test_many_decades_have_few_ticks() -> None:
    ticks = LogAxis(1e-9, 1e9).ticks()
    assert [tick.label for tick in ticks] == [
        "1e-9", "1e-6", "1e-3", "1.0", "1,000", "1,000,000", "1e9",
    ]  # fmt: skip


def test_axis_without_a_positive_value_still_has_an_extent() -> None:
    axis = LogAxis.over([0.0, math.nan])
    assert axis.low < axis.high


def test_depth_shows_accumulated_and_replayed_error_of_both_runs() -> None:
    chart = draw_depth(
        report_of(
            stage("b", 1, "replay-tensor", 0.02),
            stage("a", 0, "replay-tensor", 0.003),
            stage("a", 0, "accumulated", 0.004),
            stage("b", 1, "accumulated", 0.05),
        )
    )
    assert chart is not None
    assert chart.points == [
        (250.0, [
            "a", "accumulated, candidate: 4e-3", "accumulated, noise: 1e-3",
            "replayed, candidate: 3e-3", "replayed, noise: 1e-3",
        ]),
        (750.0, [
            "b", "accumulated, candidate: 5e-2", "accumulated, noise: 1e-3",
            "replayed, candidate: 2e-2", "replayed, noise: 1e-3",
        ]),
    ]  # fmt: skip


def test_port_with_the_highest_ratio_represents_its_stage() -> None:
    chart = draw_depth(
        report_of(
            stage("a", 0, "replay-tensor", 0.009, port="output.0", ratio=9.0),
            stage("a", 0, "replay-tensor", 0.5, port="output.1", ratio=2.0),
        )
    )
    assert chart is not None
    assert chart.points[0][1][1] == "replayed, candidate: 9e-3"


def test_stage_without_an_accumulated_error_shows_what_it_has() -> None:
    chart = draw_depth(report_of(stage("a", 0, "replay-tensor", 0.02)))
    assert chart is not None
    assert chart.points[0][1] == ["a", "replayed, candidate: 2e-2", "replayed, noise: 1e-3"]


def test_layers_are_marked_where_they_begin() -> None:
    rows = [
        stage(name, order, "replay-tensor", 0.001)
        for order, name in enumerate(
            ["model", "model.layers.0", "model.layers.0.mlp", "model.layers.1", "lm_head"]
        )
    ]
    chart = draw_depth(report_of(*rows))
    assert chart is not None
    assert [(tick.at, tick.label) for tick in chart.x_ticks] == [
        (300.0, "0"),
        (700.0, "1"),
    ]


def test_stages_that_do_not_fit_are_left_out_by_their_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "MAX_POINTS", 2)
    rows = [
        stage(name, order, "replay-tensor", error)
        for order, (name, error) in enumerate([("a", 0.004), ("b", 0.001), ("c", 0.009)])
    ]
    chart = draw_depth(report_of(*rows))
    assert chart is not None
    assert [lines[0] for _, lines in chart.points] == ["a", "c"]
    assert chart.statements == [
        "2 of 3 stages are shown, those with the highest ratios; the highest ratio left out is 1.0x."
    ]


def test_line_of_kl_breaks_between_prompts() -> None:
    chart = draw_kl(
        report_of(token(1, 0, 0.1), token(0, 1, 0.1), token(0, 0, 0.1), token(1, 1, 0.1))
    )
    assert chart is not None
    assert [lines[0] for _, lines in chart.points] == [
        "prompt 0, token 0", "prompt 0, token 1", "prompt 1, token 0", "prompt 1, token 1",
    ]  # fmt: skip
    commands = [letter for letter in chart.series[0].path if letter in "ML"]
    assert commands == ["M", "L", "M", "L"]


def test_kl_that_is_not_finite_is_marked_apart() -> None:
    chart = draw_kl(report_of(token(0, 0, 0.1), token(0, 1, math.nan)))
    assert chart is not None
    candidate = chart.series[0]
    assert candidate.dots.count("M") == 1
    assert candidate.outside == "M750 0h0"


def test_tokens_that_do_not_fit_are_pooled_by_their_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_POINTS", 2)
    chart = draw_kl(
        report_of(token(0, 0, 0.1), token(0, 1, 0.7), token(0, 2, 0.2), token(1, 0, 0.3))
    )
    assert chart is not None
    assert [lines[:2] for _, lines in chart.points] == [
        ["prompt 0, tokens 0 to 1", "candidate: 0.7"],
        ["prompt 0, token 2", "candidate: 0.2"],
        ["prompt 1, token 0", "candidate: 0.3"],
    ]
    assert chart.statements == ["Each cell shows the worst of up to 2 adjacent tokens."]


def test_without_measurements_there_are_no_curves() -> None:
    assert draw_depth(report_of()) is None
    assert draw_kl(report_of()) is None


def step_of(
    number: int, statistic: str, actual: float, expected: float, **judged: Any
) -> Measurement:
    facts: dict[str, Any] = {"level": "overfit", "port": "loss", "ratio": math.nan} | judged
    return Measurement(
        module="", step=number, statistic=statistic, actual=actual, expected=expected, **facts
    )


def curve_of(name: Literal["loss", "grad-norm"], *rows: Measurement) -> Curve:
    curve = draw_curve(report_of(*rows), name)
    assert curve is not None
    return curve


def test_losses_are_drawn_for_every_side_with_the_target() -> None:
    target = step_of(0, "overfit-loss", 10.0, 1.0, ratio=10.0, limit=1.0)
    chart = curve_of(
        "loss",
        target,
        step_of(0, "candidate-loss", 100.0, 100.0), step_of(1, "candidate-loss", 10.0, 1.0),
        step_of(0, "noise-loss", 100.0, 100.0), step_of(1, "noise-loss", math.nan, 1.0),
    ).chart  # fmt: skip

    assert [curve.name for curve in chart.series] == [
        "candidate", "exact reference", "noise run", "target",
    ]  # fmt: skip
    assert chart.points[1] == (
        750.0,
        ["step 1", "candidate: 10.0", "exact reference: 1.0", "noise run: nan", "target: 1.0"],
    )
    candidate, yardstick, noise, _ = chart.series
    # 1 to 100 with a margin of 1.5 both ways: ln(1.5) of ln(225) from an end.
    assert candidate.path == "M250 74.9L750 500"
    assert yardstick.path == "M250 74.9L750 925.1"
    assert noise.outside == "M750 0h0"


def test_table_of_a_curve_has_relative_errors_and_what_is_judged() -> None:
    free_run = step_of(
        0, "loss-error", 0.25, 0.125, level="loss", port="free-run", ratio=2.0, limit=5.0
    )
    others = [
        step_of(0, "loss-error", 9.0, 1.0, level="restart", ratio=9.0, limit=5.0),
        step_of(0, "replay-tensor", 9.0, 1.0, level="loss", ratio=9.0, limit=5.0),
    ]
    curve = curve_of(
        "loss",
        *others,
        free_run,
        step_of(0, "candidate-loss", 8.0, 8.0), step_of(1, "candidate-loss", 5.0, 4.0),
        step_of(0, "noise-loss", 7.0, 8.0), step_of(1, "noise-loss", 4.0, 4.0),
        step_of(1, "resumed-loss", 6.0, 4.0),
    )  # fmt: skip

    assert curve.judged == free_run
    columns = (
        "step", "candidate", "exact reference", "noise run", "resumed", "error", "noise", "ratio / limit",
    )  # fmt: skip
    assert curve.lines == [
        dict(zip(columns, line, strict=True))
        for line in (
            ("0", "8.0", "8.0", "7.0", "", "0", "0.125", ""),
            ("1", "5.0", "4.0", "4.0", "6.0", "0.25", "0", ""),
            ("judged", "", "", "", "", "0.25", "0.125", "2.0x / 5.0x"),
        )
    ]


def test_judged_norm_is_the_worst_of_all_ranks() -> None:
    norms = [
        step_of(
            0, "replay-tensor", 0.1, 0.1, level="gradients", port="norm", ratio=ratio, limit=5.0,
            rank=rank,
        )
        for rank, ratio in enumerate((1.0, 3.0, 2.0))
    ]  # fmt: skip
    curve = curve_of("grad-norm", *norms, step_of(0, "candidate-grad-norm", 2.0, 1.0))

    assert curve.judged == norms[1]


def test_value_that_is_not_finite_is_a_gap_and_is_named() -> None:
    losses = [1.0, math.nan, 1.0, 1.0]
    chart = curve_of(
        "loss",
        *(step_of(step, "candidate-loss", loss, 1.0) for step, loss in enumerate(losses)),
        *(step_of(step, "resumed-loss", math.inf, 1.0) for step in (2, 3)),
    ).chart

    candidate = chart.series[0]
    assert candidate.path == "M125 500M625 500L875 500"
    assert candidate.outside == "M375 0h0"
    assert chart.series[-1].name == "resumed"
    (statement,) = chart.statements
    assert statement == (
        "Values that are not finite leave a gap and a mark at the top: candidate in step 1; resumed"
        " in steps 2, 3."
    )


def test_norms_that_the_candidate_does_not_report_are_named() -> None:
    curve = curve_of("grad-norm", step_of(0, "noise-grad-norm", 3.0, 2.0))

    assert curve.chart.statements == ["The candidate reports no values."]
    assert curve.lines == [
        {"step": "0", "exact reference": "2.0", "noise": "0.5", "noise run": "3.0"}
    ]


def test_single_step_is_a_dot() -> None:
    chart = curve_of("loss", step_of(0, "candidate-loss", 1.0, 1.0)).chart

    assert [curve.dots for curve in chart.series] == ["M500 500h0"] * 2
    assert [tick.label for tick in chart.x_ticks] == ["0"]


def test_steps_that_do_not_fit_are_left_out_of_chart_and_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "MAX_POINTS", 2)
    curve = curve_of("loss", *(step_of(step, "candidate-loss", 1.0, 1.0) for step in range(4)))

    assert [line["step"] for line in curve.lines] == ["0", "2"]
    assert curve.chart.statements == ["One step in 2 is shown."]


def test_without_training_steps_nothing_is_drawn() -> None:
    rows = token(0, 0, 0.1), step_of(0, "loss-error", 0.1, 0.1, limit=5.0)
    assert draw_curve(report_of(*rows), "loss") is None
    assert draw_curve(report_of(*rows), "grad-norm") is None


def cell(module: str, position: int, ratio: float, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "statistic": "token",
        "order": ord(module[0]) if module else 0, "prompt": 0, "position": position,
        "actual": 0.01 * ratio, "expected": 0.01, "ratio": ratio,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def ratios(found: pictures.HeatMap) -> list[list[float | None]]:
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
    assert found.statements == ["Each cell shows the worst of up to 2 adjacent tokens."]


def test_modules_with_the_lowest_ratios_are_left_out_and_it_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "MAX_STAGES", 2)
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
    monkeypatch.setattr(pictures, "MAX_PROMPTS", 1)
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


def unpacked(packed: dict[str, Any]) -> list[Any]:
    return [packed["labels"][code] for code in packed["codes"]]


def test_numbers_are_packed_as_they_are_printed() -> None:
    values = [0.0, 1e-31, 9.995, 9.985, 99.95, 0.9995, 0.09999, 1e42, 5e-324, -0.25, -3e-5]
    values += [10.0**exponent for exponent in range(-32, 44)]
    values += [(number + 0.5) / 100 for number in range(100, 1000)]  # where rounding is close
    values += [math.inf, -math.inf, math.nan]
    assert unpacked(pack_numbers(values)) == [format_number(value) for value in values]


def test_each_number_is_stored_once_by_its_printed_digits() -> None:
    packed = pack_numbers([14.62, 14.6, 14.649, 14.65])
    assert packed["labels"] == ["14.6", "14.7"]
    assert packed["codes"] == [0, 0, 0, 1]


def test_labels_of_numbers_are_sorted() -> None:
    values = [math.nan, 1e300, 0.1, 9.99, None, -1.0, math.inf, 10.0, 0.0, 1e-40]
    packed = pack_numbers(values)
    assert packed["labels"] == [
        None, "-1.0", "0", "1e-40", "0.1", "9.99", "10.0", "1e300", "inf", "nan",
    ]  # fmt: skip
    assert packed["isNumeric"]


def test_labels_are_stored_once_and_sorted() -> None:
    packed = pack_labels(["b", "a", "b\n"])
    assert packed == {"labels": ["a", "b", "b\\n"], "codes": [1, 0, 2], "isNumeric": False}
    assert pack_labels([3, None, 3]) == {"labels": [None, 3], "codes": [1, 0, 1], "isNumeric": True}


def test_data_is_compressed_json() -> None:
    data = {"names": ["</script>", "\u2713"], "top": 10.0}
    assert json.loads(gzip.decompress(base64.b64decode(pack_data(data)))) == data


def test_data_with_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack_data({"top": math.nan})
