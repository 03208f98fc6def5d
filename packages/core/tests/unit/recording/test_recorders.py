import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import assay
from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.recording.capture import capture, make_rows
from assay.recording.recorders import NAMES, measure_statistics, take_values
from assay.sites import RowMap
from assay.trace import Trace
from assay.verdicts import Outcome


def measured(tensor: Tensor) -> dict[str, float]:
    found = measure_statistics(tensor)
    return dict(zip(NAMES, take_values([found])[id(found)].tolist(), strict=True))


def test_values() -> None:
    found = measured(torch.tensor([[3.0, -4.0, 0.0, 0.0]]))
    del found["projection"]
    expected = {"min": -4.0, "max": 3.0, "mean": -0.25, "norm": 5.0, "nan": 0, "inf": 0}
    assert found == expected | {"channels": 4}


def test_numbers_that_are_not_finite_are_counted() -> None:
    found = measured(torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]))
    assert (found["nan"], found["inf"]) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_low_precision_tensors_do_not_overflow(dtype: torch.dtype) -> None:
    # The norm is 512 * 200 = 102,400: over the largest float16, and not a bfloat16.
    found = measured(torch.full((1, 40_000), 512.0, dtype=dtype))
    assert (found["mean"], found["norm"]) == (512.0, 102_400.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_tensor_is_measured_in_float32_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[1.0, -3.0, 4096.0, 4096.0]], dtype=dtype)
    found = measured(value)
    # Neither dtype has a number 2,047.5.
    assert (found["min"], found["max"], found["mean"]) == (-3, 4096, 2047.5)
    assert measure_statistics(value).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (2048,), (4, 16, 32), (2048, 1)])
def test_projections_differ_where_norms_do_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for changed in (value.flip(0), -value, value.flip(-1) if shape[-1] > 1 else -value):
        before, after = measured(value), measured(changed)
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-6)
        difference = abs(after["projection"] - before["projection"])
        assert 0.02 < difference / float((changed - value).double().norm()) < 5
    assert measured(value.clone()) == measured(value)


def test_an_empty_dimension_and_float8_are_measured() -> None:
    assert measured(torch.tensor(3.0))["norm"] == 3
    assert measured(torch.ones(2, 3).to(torch.float8_e4m3fn))["mean"] == 1


def test_a_trace_keeps_the_statistics_of_each_result(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    with torch.no_grad(), capture(net, tmp_path / "t", stats_only=True):
        output = net(torch.ones(4, 2))
    tensors = {one.site.port: one for one in open_dump(tmp_path / "t").tensors}
    assert tensors["output"].statistics == measured(output)


def run_kernels(folder: Path, order: list[int], fault: float = 0.0) -> None:
    """Two layers without modules, on tokens of two requests in any order, for two steps."""
    requests, positions = [7, 7, 7, 9], [0, 1, 2, 0]
    with assay.capture(None, folder) as running:
        for step in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))[order]
            where = {
                "request": [requests[n] for n in order],
                "positions": [positions[n] + 3 * step for n in order],
            }
            for layer in range(2):
                assay.capture.record(f"layers.{layer}.input", x, "s h", **where)
                x = torch.sin(x) * (1 + fault * layer)
                assay.capture.record(f"layers.{layer}", x, "s h", **where)
            running.step()


def test_code_without_modules_is_compared_in_any_order_of_tokens(tmp_path: Path) -> None:
    run_kernels(tmp_path / "golden", [0, 1, 2, 3])
    run_kernels(tmp_path / "reordered", [3, 1, 0, 2])
    run_kernels(tmp_path / "fault", [3, 1, 0, 2], fault=0.01)
    same = assay.compare(tmp_path / "golden", tmp_path / "reordered", output=tmp_path / "a")
    assert same.verdict is Outcome.PASS
    wrong = assay.compare(tmp_path / "golden", tmp_path / "fault", output=tmp_path / "b")
    assert wrong.verdict is Outcome.FAIL
    assert wrong.location is not None
    assert wrong.location.module == "layers.1"


@pytest.mark.parametrize("stats_only", [False, True])
def test_unnamed_rows_are_not_requests(tmp_path: Path, *, stats_only: bool) -> None:
    """Statistics hold no token ids: a batch and its single rows cannot be paired."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(50, 64), nn.Linear(64, 64)

        def forward(self, input_ids: Tensor) -> Tensor:
            y: Tensor = self.out(self.embed(input_ids))
            return y

    net, ids = Net(), torch.arange(12).view(3, 4)
    with torch.no_grad(), assay.capture(net, tmp_path / "batch", stats_only=stats_only):
        net(ids)
    with torch.no_grad(), assay.capture(net, tmp_path / "single", stats_only=stats_only):
        for row in range(3):
            net(ids[row : row + 1])
    verdict = assay.compare(tmp_path / "batch", tmp_path / "single", output=tmp_path / "out")
    assert verdict.verdict is (Outcome.NOT_COMPARED if stats_only else Outcome.PASS)


def test_a_record_inside_of_a_pass_belongs_to_it(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            half = input_ids.float() / 2
            assay.capture.record("half", half)
            return half

    net = Net()
    with torch.no_grad(), assay.capture(net, tmp_path / "t", steps="1"):
        for _ in range(3):
            net(torch.ones(1, 4, dtype=torch.long))
    calls = {call.site.module: call for call in Trace.open(tmp_path / "t").calls}
    assert calls["half"].site.step == calls[""].site.step == 1
    assert calls["half"].rows == calls[""].rows is not None
    assert calls["half"].caller == ""


def test_rows_are_set_only_for_the_next_pass(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with assay.capture(net, tmp_path / "t"):
        assay.capture.rows([7, 7, 9], [0, 1, 40])
        net(torch.ones(3, 2))
        net(torch.ones(3, 2))
    first, second = Trace.open(tmp_path / "t").calls
    assert first.rows == RowMap((7, 7, 9), ((0,), (1,), (40,)))
    assert second.rows is None


def test_rows_accept_numbers_lists_and_tensors() -> None:
    assert make_rows(3, range(2)) == RowMap((3,), ((0, 1),))
    assert make_rows([3, 4], torch.tensor([[0, 1], [5, -1]])) == RowMap((3, 4), ((0, 1), (5, -1)))
    for requests, positions in (([1, 2], [0]), ([1, 2], [[0], [0, 1]]), ([], [])):
        if requests:
            with pytest.raises(UsageError, match="requests, but positions of"):
                make_rows(requests, positions)


def test_invalid_records_are_refused_and_excluded_ones_ignored(tmp_path: Path) -> None:
    assay.capture.record("nobody listens", torch.ones(2))
    with assay.capture(None, tmp_path / "t", include=("wanted",)):
        assay.capture.record("left out", torch.ones(2))
        assay.capture.record("wanted", torch.ones(2))
        with pytest.raises(UsageError, match="a word for each of 2 dims"):
            assay.capture.record("wanted", torch.ones(2, 3), "b s h")
    assert [one.site.at.module for one in open_dump(tmp_path / "t").tensors] == ["wanted"]


def test_numbers_repeat_after_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        found = []
        uncontrolled: list[str] = []
        for _ in range(2):
            uncontrolled = assay.seed_all(3)
            found.append((random.getrandbits(32), float(torch.rand(1))))
        assert found[0] == found[1]
        assert torch.are_deterministic_algorithms_enabled()
        assert any("PYTHONHASHSEED" in one for one in uncontrolled)
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
        assert not any("PYTHONHASHSEED" in one for one in assay.seed_all(3))
    finally:
        torch.use_deterministic_algorithms(before)


def test_control_and_budget_hold_for_code_without_modules(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    with assay.capture(None, tmp_path / "t", control=str(file), max_disk="1M") as running:
        for step in range(8):
            if step in (1, 2):
                file.write_text(f'{{"capture": {"false" if step == 1 else "true"}}}')
            assay.capture.record("x", torch.full((256, 256), float(step)))
            running.step()
    calls = Trace.open(tmp_path / "t").calls
    assert [call.site.step for call in calls] == [0, 2, 3, 4, 5, 6, 7]
    assert calls[0].ports == ("output",)
    assert calls[-1].ports == ("output.statistics",)
