"""The error that accumulates without injected values."""

import math
from typing import Any

import pytest
import torch

from assay.locating.measuring import DriftMeter


def drift(actual: list[float], expected: list[float]) -> float:
    no_trace: Any = None
    meter = DriftMeter(no_trace)
    meter._add("layer", torch.tensor([actual]), torch.tensor([expected]))
    return meter.relative_errors()["layer"]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([4.0, 3.0], [4.0, 0.0], 0.75),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([2.0, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_drift_is_relative_to_the_expected_norm(
    actual: list[float], expected: list[float], error: float
) -> None:
    assert drift(actual, expected) == error


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_a_value_that_is_finite_on_one_side_only_has_no_drift(odd: float, rest: float) -> None:
    assert math.isnan(drift([rest, odd], [rest, 2.0]))
    assert math.isnan(drift([rest, 2.0], [rest, odd]))
