"""The table of all tensors, and errors of single tokens."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparison.judging import rows
from assay.comparison.judging.judged_ports import JudgedPort, judge_ports
from assay.comparison.judging.rows import make_table
from assay.comparison.measuring.pair_measurer import PairMeasurer
from assay.comparison.measuring.pair_values import measure_metrics, measure_pair
from assay.comparison.pairing.matching import match_series
from assay.comparison.pairing.passes import align_passes, find_passes
from assay.comparison.pairing.port_series import collect_series
from assay.dumps.protocol import Dump, Statistic
from assay.judge.limits import load_limits
from assay.output.tables import Cell
from assay.report.page.pictures import HeatMap, draw_heat_map
from assay.report.run_report import Report, read_report
from assay.verdicts import Ratio
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump
from packages.core.tests.unit.comparison.small_dumps import Change, judge, write

X = torch.tensor([[[3.0, 4.0]]])
Y = torch.tensor([[[3.0, 2.0]]])


def tabulate(
    expected: Dump, actual: Dump, judge: Callable[..., list[JudgedPort]] = judge_ports
) -> list[dict[str, Cell]]:
    """Compare two dumps, and return the rows of the table by column."""
    matching = match_series(collect_series(expected), collect_series(actual))
    alignment = align_passes(find_passes(expected), find_passes(actual))
    measurer = PairMeasurer(
        alignment, expected.is_training, {}, add_metrics=partial(measure_pair, measure_metrics, ())
    )
    measured = measurer.measure(matching)
    ports = [pair.port for pair in matching.pairs]
    judged = judge(ports, measured, None, load_limits(), 2**-24, {})
    table = make_table(measured.pairs, collect_series(expected), collect_series(actual), judged)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def rows_of(expected: Values, actual: Values) -> list[dict[str, Cell]]:
    return tabulate(make_dump(expected), make_dump(actual))


def names(rows: list[dict[str, Cell]]) -> list[tuple[Cell, Cell, Cell]]:
    return [(row["module"], row["step"], row["verdict"]) for row in rows]


def test_a_row_holds_address_metrics_and_verdict() -> None:
    (row,) = rows_of({("b", "output", 0): X}, {("b", "output", 0): Y})
    # The relative error over the expected one, 4 unit roundoffs.
    assert row.pop("noise_ratio") == pytest.approx(0.4 / (4 * 2**-24))
    assert row.pop("cosine_similarity") == pytest.approx(17 / (5 * 13**0.5))
    assert row.pop("kl_divergence") == pytest.approx(math.tanh(1 / 2))
    assert row == {
        "order": 0, "module": "b", "port": "output", "phase": "forward", "rank": 0, "step": 0,
        "batch": 0, "expected_name": "b.output.0", "expected_shape": "[1, 1, 2]",
        "expected_dtype": "float32", "actual_name": "b.output.0", "actual_shape": "[1, 1, 2]",
        "actual_dtype": "float32", "max_relative_error": 0.5, "mean_relative_error": 0.25,
        "max_absolute_error": 2.0, "mean_absolute_error": 1.0, "relative_euclidean_distance": 0.4,
        "num_nonfinite_expected": 0, "num_nonfinite_actual": 0, "statistic": "accumulated",
        "limit": 3.5, "verdict": "FAIL", "reason": None,
    }  # fmt: skip


def test_rows_come_in_network_order_step_by_step() -> None:
    values = {("b", "output", 0): X, ("a", "output", 0): X, ("b", "output", 1): X}
    rows = rows_of(values, dict(reversed(values.items())))
    assert names(rows) == [("b", 0, "PASS"), ("a", 0, "PASS"), ("b", 1, "PASS")]
    assert [row["order"] for row in rows] == [0, 1, 2]


def test_tensors_without_a_partner_have_rows_of_their_own() -> None:
    rows = rows_of(
        {("a", "output", 0): X, ("b", "output", 0): X, ("c", "output", 0): X},
        {("a", "output", 0): X, ("new", "output", 0): X, ("c", "output", 0): X},
    )
    assert names(rows) == [
        ("a", 0, "PASS"), ("new", 0, "NOT_COMPARED"), ("b", 0, "NOT_COMPARED"), ("c", 0, "PASS"),
    ]  # fmt: skip
    assert [row["reason"] for row in rows[1:3]] == [
        "no partner in EXPECTED",
        "no partner in ACTUAL",
    ]
    assert (rows[1]["expected_name"], rows[1]["actual_name"]) == (None, "new.output.0")
    assert rows[2]["cosine_similarity"] is None


def test_other_shapes_have_a_row_with_both() -> None:
    (row,) = rows_of({("a", "output", 0): X}, {("a", "output", 0): torch.zeros(1, 1, 3)})
    assert (row["expected_shape"], row["actual_shape"]) == ("[1, 1, 2]", "[1, 1, 3]")
    assert row["verdict"] == "NOT_COMPARED"
    assert row["reason"] == "its shape is [1, 1, 3], expected [1, 1, 2]"


def test_parameters_of_other_shapes_are_not_compared() -> None:
    (row,) = rows_of(
        {("a", "parameter.weight", 0): torch.zeros(2, 3)},
        {("a", "parameter.weight", 0): torch.zeros(4, 3)},
    )
    assert row["reason"] == "its shape is [4, 3], expected [2, 3]"


def test_a_parameter_is_compared_once_and_every_copy_has_a_row() -> None:
    weight = {("a", "parameter.weight", step): torch.ones(2, 2) for step in range(2)}
    rows = rows_of(weight, weight)
    assert names(rows) == [
        ("a", 0, "PASS"), ("a", 1, "NOT_COMPARED"), ("a", 1, "NOT_COMPARED"),
    ]  # fmt: skip
    assert rows[1]["reason"] == "repeated: a parameter is compared once per step"


def test_masks_are_compared_and_have_no_metrics() -> None:
    mask = torch.tensor([[[[True, False], [True, True]]]])
    (row,) = rows_of(
        {("a", "input.attention_mask", 0): mask}, {("a", "input.attention_mask", 0): mask}
    )
    assert (row["verdict"], row["statistic"], row["cosine_similarity"]) == ("PASS", "exact", None)


@pytest.mark.parametrize(
    ("statistics", "judged"),
    [
        ({}, (None, None, "NOT_COMPARED", "no norm to compare")),
        ({"norm": 5.0}, ("norm-error", 0.0, "PASS", None)),
        ({"norm": 6.0}, ("norm-error", pytest.approx(0.2 / 2**-22), "FAIL", None)),
    ],
)
def test_statistics_have_a_verdict_and_no_metrics(
    statistics: dict[Statistic, float], judged: tuple[object, ...]
) -> None:
    dump = make_dump({("a", "output", 0): X})
    tensors = [replace(one, load=None, statistics=statistics) for one in dump.tensors]
    (row,) = tabulate(dump, replace(dump, tensors=tensors))
    assert (row["statistic"], row["noise_ratio"], row["verdict"], row["reason"]) == judged
    assert row["cosine_similarity"] is None


def test_a_pair_that_was_not_judged_has_metrics_and_no_verdict() -> None:
    dump = make_dump({("a", "output", 0): X})
    (row,) = tabulate(dump, dump, lambda *_: [])
    assert row["cosine_similarity"] == 1
    assert [row[name] for name in ("statistic", "noise_ratio", "limit", "verdict", "reason")] == [
        None, None, None, None, None,
    ]  # fmt: skip


def test_a_nan_is_shown_and_fails() -> None:
    spoiled = torch.tensor([[[3.0, torch.nan]]])
    (row,) = rows_of({("a", "output", 0): X}, {("a", "output", 0): spoiled})
    assert (row["num_nonfinite_actual"], row["max_absolute_error"]) == (1, 0.0)
    assert (row["verdict"], row["statistic"]) == ("FAIL", "non-finite")


@pytest.mark.parametrize(
    ("wrong", "statistic"),
    [(Y, "accumulated"), (torch.tensor([[[3.0, torch.nan]]]), "non-finite")],
)
def test_a_row_has_its_own_verdict_and_not_that_of_other_steps(
    wrong: torch.Tensor, statistic: str
) -> None:
    steps = [("a", "output", step) for step in range(3)]
    rows = rows_of(dict.fromkeys(steps, X), {steps[0]: X, steps[1]: wrong, steps[2]: X})
    assert names(rows) == [("a", 0, "PASS"), ("a", 1, "FAIL"), ("a", 2, "PASS")]
    assert [row["statistic"] for row in rows] == [statistic] * 3
    assert [row["noise_ratio"] for row in rows[::2]] == [0.0, 0.0]


def test_an_equal_row_passes_whatever_statistic_decides() -> None:
    """Only all steps together show the error of a channel."""
    steps = [("a", "output", step) for step in range(2)]
    expected, actual = dict.fromkeys(steps, X), {steps[0]: X, steps[1]: Y}

    def judge(*args: Any) -> list[JudgedPort]:
        (found,) = judge_ports(*args)
        return [replace(found, ratios=(Ratio("replay-channel", 0.1, 1e-3).judged(3.5),))]

    rows = tabulate(make_dump(expected), make_dump(actual), judge)
    assert names(rows) == [("a", 0, "PASS"), ("a", 1, "FAIL")]


def test_shards_of_one_tensor_have_rows_with_the_verdict_of_the_whole() -> None:
    def on_ranks(*parts: torch.Tensor) -> Dump:
        dump = make_dump({("a", f"output.{rank}", 0): part for rank, part in enumerate(parts)})
        tensors = [
            replace(
                one,
                site=replace(one.site, at=replace(one.site.at, rank=rank), port="output"),
                key=f"rank{rank}",
            )
            for rank, one in enumerate(dump.tensors)
        ]
        return replace(dump, tensors=tensors)

    whole = torch.arange(1.0, 9.0).reshape(1, 1, 8)
    rows = tabulate(on_ranks(whole), on_ranks(whole[..., :4], 2 * whole[..., 4:]))
    assert [(row["rank"], row["actual_name"], row["verdict"]) for row in rows] == [
        (0, "rank0", "PASS"), (1, "rank1", "FAIL"),
    ]  # fmt: skip
    rows = tabulate(on_ranks(whole[..., :4], whole[..., 4:]), on_ranks(whole))
    assert [(row["expected_name"], row["verdict"]) for row in rows] == [
        ("rank0", "PASS"), ("rank1", "PASS"),
    ]  # fmt: skip


TOKENS = 10  # a prompt of 8 and two decode steps
FAULTY = "layers.1.down"


def break_token(network: Any) -> None:
    """Make one module wrong at one token of the prompt."""

    def damage(module: nn.Module, args: object, output: Tensor) -> Tensor:
        del module, args
        if output.shape[1] > 5:
            output[:, 5] *= 1.5
        return output

    network.layers[1].down.register_forward_hook(damage, prepend=True)


def compared(folder: Path, change: Change = lambda _: None, **options: str) -> Report:
    judge(write(folder / "golden"), write(folder / "mine", change), folder / "run", **options)
    return read_report(folder / "run")


def map_of(report: Report) -> HeatMap:
    found = draw_heat_map(report)
    assert found is not None
    return found


def test_worst_cell_is_the_damaged_token_of_the_damaged_module(tmp_path: Path) -> None:
    report = compared(tmp_path, break_token)
    found = map_of(report)
    worst = found.cells[found.worst]
    assert worst is not None
    assert (worst.module, worst.position) == (FAULTY, 5)
    assert worst.actual == pytest.approx(0.5)
    assert report.decided.worst_token == worst
    assert [column.first for column in found.columns] == list(range(TOKENS))
    assert [column.step for column in found.columns] == [0] * 8 + [1, 2]


def test_equal_dumps_have_an_error_of_zero_everywhere(tmp_path: Path) -> None:
    found = map_of(compared(tmp_path))
    assert len(found.stages) == 10  # embed, three blocks of three
    assert {cell.actual if cell else None for cell in found.cells} == {0.0}


def test_errors_are_relative_to_those_of_the_noise_dump(tmp_path: Path) -> None:
    noise = write(tmp_path / "noise", lambda network: network.layers[1].down.weight.data.mul_(1.01))
    found = map_of(compared(tmp_path, break_token, noise=str(noise)))
    worst = found.cells[found.worst]
    assert worst is not None
    assert worst.position == 5
    assert worst.expected > 1e-3
    assert worst.ratio == pytest.approx(worst.actual / worst.expected)


def test_large_dump_keeps_its_blocks_and_its_worst_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_TOKEN_ROWS", 12)
    report = compared(tmp_path, break_token)
    found = map_of(report)
    assert [stage.module for stage in found.stages] == [
        "embed", "layers.0", "layers.1", "layers.2"
    ]  # fmt: skip
    assert len(found.columns) == 3
    assert 5 in [column.first for column in found.columns]
    assert any("the 3 tokens with the largest ones" in note for note in report.notes)
