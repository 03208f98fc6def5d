import math
import re
from pathlib import Path
from typing import get_args

import pytest

from assay.statistics import METRICS, STATISTICS, Statistic, worst_error


def test_every_deciding_statistic_has_an_entry_in_the_order_of_reports() -> None:
    deciding = get_args(Statistic)
    assert tuple(STATISTICS)[: len(deciding)] == deciding


def test_the_documented_statistics_are_those_that_decide_by_noise_or_equality() -> None:
    text = (Path(__file__).parents[4] / "docs" / "noise.md").read_text(encoding="utf-8")
    table = text.partition("\n## Statistics\n")[2].partition("\n## ")[0]
    columns = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for column in columns for name in re.findall("`(.*?)`", column)]

    assert sorted(named) == sorted(set(get_args(Statistic)) - METRICS)


def test_borrowed_limits_belong_to_statistics_with_their_own() -> None:
    for entry in STATISTICS.values():
        assert entry.limit_of is None or STATISTICS[entry.limit_of].limit_of is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_the_worst_error_wherever_it_stands(place: int) -> None:
    errors = [0.1, math.inf]
    errors.insert(place, math.nan)
    assert math.isnan(worst_error(errors))


def test_the_worst_error_is_the_largest() -> None:
    assert worst_error([0.1, math.inf, 0.2]) == math.inf
    assert worst_error([0.1, 0.2]) == 0.2
    assert worst_error([]) == 0.0
