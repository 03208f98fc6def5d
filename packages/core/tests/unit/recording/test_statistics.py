from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.dumps.recognizing import open_dump
from assay.recording.capture import capture
from assay.recording.statistics import NAMES, measure_statistics, take_values


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
