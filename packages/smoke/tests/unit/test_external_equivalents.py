"""The equivalent run: unchecked parts, and the precision of logged losses."""

from types import SimpleNamespace
from typing import Any

import pytest

from assay.runs import SilentProgress
from assay_smoke.external.equivalent_run import judge_equivalent, unit_in_log
from assay_smoke.external.runs import Cycle


def test_split_is_unchecked_without_a_whole_last_checkpoint() -> None:
    library = SimpleNamespace(split_otherwise=lambda: "another split", steps=9)
    launch: Any = SimpleNamespace(library=library)

    level = judge_equivalent(Cycle(launch, SilentProgress())).level

    assert level.verdict is None
    assert (level.model_extra or {})["unchecked"] is True
    assert "it was not checked whether training depends on the split" in str(level.reason)


@pytest.mark.parametrize(
    ("value", "logged", "unit"),
    [
        (2.114, [2.114, 1.442, 10.23], 1e-3),  # four significant digits
        (10.23, [2.114, 0.5123, 10.23], 1e-2),
        (10.2345, [10.2345, 2.1145], 1e-4),  # four decimals
        (2.1145, [10.2345, 2.1145], 1e-4),
        (2.5e-5, [2.5e-5, 1.25e-5], 1e-7),
        (0.0, [0.0, 0.25], 1e-2),
        (2.0, [float("nan"), 2.5], 1e-1),
    ],
)
def test_the_unit_is_that_of_the_last_digit_that_is_logged(
    value: float, logged: list[float], unit: float
) -> None:
    assert unit_in_log(value, logged) == pytest.approx(unit)
