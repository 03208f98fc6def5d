from typing import get_args

from assay.statistics import STATISTICS, Statistic


def test_every_deciding_statistic_has_an_entry_in_the_order_of_reports() -> None:
    deciding = get_args(Statistic)
    assert tuple(STATISTICS)[: len(deciding)] == deciding


def test_borrowed_limits_belong_to_statistics_with_their_own() -> None:
    for entry in STATISTICS.values():
        assert entry.limit_of is None or STATISTICS[entry.limit_of].limit_of is None
