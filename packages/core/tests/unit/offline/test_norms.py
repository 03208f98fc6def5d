import math
from pathlib import Path

import pytest
import torch

import assay
from assay.dumps.recognizing import open_dump
from assay.offline.measuring.pair_values import compare_norms
from assay.recording.recorders import NAMES, measure_statistics, take_values


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (2.0, 2.0, 0.0),
        (2.5, 2.0, 0.25),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.nan, 2.0, math.nan),
        (math.inf, 2.0, math.nan),
        (2.0, math.inf, None),
        (math.nan, math.nan, None),
    ],
)
def test_norms(actual: float, expected: float, error: float | None) -> None:
    found = compare_norms({"norm": actual}, {"norm": expected})
    assert found == pytest.approx(error, nan_ok=True)


def test_infinite_norms_agree_only_with_as_many_infinities() -> None:
    assert compare_norms({"norm": math.inf, "inf": 3.0}, {"norm": math.inf, "inf": 3.0}) == 0.0
    assert compare_norms({"norm": math.inf, "inf": 4.0}, {"norm": math.inf, "inf": 3.0}) is None


def test_a_projection_without_a_number_is_not_a_small_difference() -> None:
    found = compare_norms(
        {"norm": 2.0, "projection": math.nan, "channels": 4.0},
        {"norm": 2.0, "projection": 1.0, "channels": 4.0},
    )
    assert found is not None
    assert math.isnan(found)


def test_tokens_in_another_order_have_another_projection() -> None:
    value = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    measured = [measure_statistics(one) for one in (value, value[torch.randperm(8)])]
    values = take_values(measured)
    both = [dict(zip(NAMES, values[id(one)].tolist(), strict=True)) for one in measured]
    assert (compare_norms(both[1], both[0]) or 0.0) > 0.01
    assert compare_norms(both[1] | {"channels": 2.0}, both[0]) == pytest.approx(0.0, abs=1e-6)


def test_a_capture_of_statistics_keeps_the_dtype_of_its_tensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(torch.bfloat16)
    with assay.capture(model, tmp_path / "trace", stats_only=True):
        model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert {one.dtype for one in open_dump(str(tmp_path / "trace")).tensors} == {"bfloat16"}
