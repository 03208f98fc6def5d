"""Records of suites and their table."""

import math

import pytest
from pydantic import ValidationError

from assay.errors import UsageError
from assay_bench.performance import suites
from assay_bench.performance.records import (
    SUITES,
    choose_suites,
    machine_kind,
)
from packages.bench.tests.unit.performance.sample_results import suite_result


def test_ratio_uses_the_fastest_round_and_the_fastest_control() -> None:
    result = suite_result([4.0, 3.0, 50.0], matmul_seconds=[2.0, 9.0, 1.5])
    assert result.ratio == 3.0 / 1.5


@pytest.mark.parametrize(("suite", "ratio"), [("prefill", 2.0 / 1.0), ("decode", 2.0 / 0.5)])
def test_each_suite_has_its_own_control(suite: str, ratio: float) -> None:
    assert suite_result(suite=suite).ratio == ratio


def test_control_of_an_unknown_suite_is_reading() -> None:
    assert suite_result(suite="not-there-any-more").control == "read"


def test_rates_are_relative_to_the_controls() -> None:
    result = suite_result([2.0, 9.0], num_tokens=64, num_flops=50, num_bytes=4)
    assert result.tokens_per_second == 32.0
    assert result.flops_share == (50 / 2.0) / (100 / 1.0)
    assert result.bytes_share == pytest.approx((4 / 2.0) / (10 / 0.5))


@pytest.mark.parametrize(
    "bad", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]]
)
def test_round_without_a_positive_time_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValidationError):
        suite_result([2.0, 3.0], matmul_seconds=bad)
    with pytest.raises(ValidationError):
        suite_result(bad, matmul_seconds=[1.0, 1.0], read_seconds=[1.0, 1.0])


def test_machine_kind_has_product_architecture_and_processors() -> None:
    device = {"device": "EPYC", "architecture": "x86_64-avx2"}
    assert machine_kind(device, 2) == "EPYC (x86_64-avx2, 2 processors)"
    assert machine_kind(device, None) == "EPYC (x86_64-avx2)"


def test_all_suites_are_the_default() -> None:
    assert choose_suites([]) == list(SUITES)


def test_suites_run_in_the_order_of_the_table() -> None:
    assert choose_suites(["compare", "prefill"]) == ["prefill", "compare"]


def test_unknown_suite_lists_the_suites() -> None:
    with pytest.raises(UsageError, match="unknown suite 'prefil'; did you mean prefill"):
        choose_suites(["prefill", "prefil"])


def test_the_process_of_the_suites_has_a_function_for_each() -> None:
    assert list(suites.FUNCTIONS) == list(SUITES)
