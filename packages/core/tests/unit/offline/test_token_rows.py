"""Errors of single tokens, for the heat map of a report."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from assay.offline.judging import rows
from assay.report.page.pictures import HeatMap, draw_heat_map
from assay.report.run_report import Report, read_report
from packages.core.tests.unit.offline.small_dumps import Change, judge, write

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
