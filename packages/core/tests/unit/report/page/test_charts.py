"""Curves along the depth and along the tokens."""

import math
from pathlib import Path
from typing import Any

import pytest

from assay.report.page import charts
from assay.report.page.charts import LogAxis, draw_depth, draw_kl, draw_losses
from assay.report.run_report import Report
from assay.verdicts import Measurement, Outcome, Verdict


def report_of(*rows: Measurement) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL), list(rows))


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


def test_many_decades_have_few_ticks() -> None:
    ticks = LogAxis(1e-9, 1e9).ticks()
    assert [tick.label for tick in ticks] == [
        "1e-9", "1e-6", "1e-3", "1.0", "1000", "1e6", "1e9",
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
        (300.0, "layer 0"),
        (700.0, "layer 1"),
    ]


def test_stages_that_do_not_fit_are_left_out_by_their_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(charts, "MAX_POINTS", 2)
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
    monkeypatch.setattr(charts, "MAX_POINTS", 2)
    chart = draw_kl(
        report_of(token(0, 0, 0.1), token(0, 1, 0.7), token(0, 2, 0.2), token(1, 0, 0.3))
    )
    assert chart is not None
    assert [lines[:2] for _, lines in chart.points] == [
        ["prompt 0, tokens 0 to 1", "candidate: 0.7"],
        ["prompt 0, token 2", "candidate: 0.2"],
        ["prompt 1, token 0", "candidate: 0.3"],
    ]
    assert chart.statements == ["One place is the worst of up to 2 adjacent tokens."]


def test_without_measurements_there_are_no_curves() -> None:
    assert draw_depth(report_of()) is None
    assert draw_kl(report_of()) is None


def step_of(number: int, statistic: str, actual: float, expected: float) -> Measurement:
    return Measurement(
        level="overfit", module="", port="loss", step=number, statistic=statistic,
        actual=actual, expected=expected, ratio=math.nan,
    )  # fmt: skip


def test_losses_are_drawn_for_every_side_with_the_target() -> None:
    rows = [
        step_of(0, "candidate-loss", 100.0, 100.0), step_of(1, "candidate-loss", 10.0, 1.0),
        step_of(0, "noise-loss", 100.0, 100.0), step_of(1, "noise-loss", math.nan, 1.0),
    ]  # fmt: skip
    target = step_of(0, "overfit-loss", 10.0, 1.0).model_copy(update={"ratio": 10.0, "limit": 1.0})
    chart = draw_losses(report_of(target, *rows))

    assert chart is not None
    assert [curve.name for curve in chart.series] == [
        "candidate", "yardstick", "noise run", "target",
    ]  # fmt: skip
    assert chart.points[1] == (
        750.0,
        ["step 1", "candidate: 10.0", "yardstick: 1.0", "noise run: nan", "target: 1.0"],
    )
    candidate, yardstick, noise, _ = chart.series
    # 1 to 100 with a margin of 1.5 both ways: ln(1.5) of ln(225) from an end.
    assert candidate.path == "M250 74.9L750 500"
    assert yardstick.path == "M250 74.9L750 925.1"
    assert noise.outside == "M750 0h0"


def test_without_losses_nothing_is_drawn() -> None:
    assert draw_losses(report_of(token(0, 0, 0.1))) is None
