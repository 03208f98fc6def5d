import math

import pytest
import torch

from packages.core.tests.subsystem.parallel.judging import differing, relative_error

EXACT = {"x": torch.tensor([3.0, 4.0], dtype=torch.float64)}
CLOSE = {"x": torch.tensor([3.0, 4.000004])}  # 8e-7 of 5, about 7 roundoffs


def test_error_of_the_size_of_the_noise_passes() -> None:
    assert differing(CLOSE, CLOSE, EXACT) == []


def test_error_far_above_the_noise_is_named() -> None:
    assert differing({"x": torch.tensor([3.0, 4.001])}, CLOSE, EXACT) == ["x"]


def test_nan_differs() -> None:
    assert differing({"x": torch.tensor([3.0, math.nan])}, CLOSE, EXACT) == ["x"]


def test_anything_but_zero_differs_from_zero() -> None:
    zero = {"x": torch.zeros(2)}
    assert relative_error(torch.tensor([0.0, 1e-30]), zero["x"]) == math.inf
    assert differing(CLOSE, zero, zero) == ["x"]
    assert differing(zero, zero, zero) == []


@pytest.mark.parametrize("actual", [{}, {"y": torch.zeros(2)}, {"x": torch.zeros(3)}])
def test_different_names_or_shapes_are_an_error(actual: dict[str, torch.Tensor]) -> None:
    with pytest.raises(AssertionError):
        differing(actual, CLOSE, EXACT)


def test_comparing_no_tensors_is_an_error() -> None:
    with pytest.raises(AssertionError, match="nothing to compare with"):
        differing({}, {}, {})
