import math

import pytest
import torch

from assay.offline.measuring.norms import compare_norms
from assay.recording.statistics import NAMES, measure_statistics, take_values


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (2.0, 2.0, 0.0),
        (2.5, 2.0, 0.25),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.nan, 2.0, math.nan),
        (2.0, math.inf, math.nan),
        (math.nan, math.nan, math.nan),
    ],
)
def test_norms(actual: float, expected: float, error: float) -> None:
    found = compare_norms({"norm": actual}, {"norm": expected})
    assert found == error or (math.isnan(found) and math.isnan(error))


def test_tokens_in_another_order_have_another_projection() -> None:
    value = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    measured = [measure_statistics(one) for one in (value, value[torch.randperm(8)])]
    values = take_values(measured)
    both = [dict(zip(NAMES, values[id(one)].tolist(), strict=True)) for one in measured]
    assert compare_norms(both[1], both[0]) > 0.01
    assert compare_norms(both[1] | {"channels": 2.0}, both[0]) < 1e-6
