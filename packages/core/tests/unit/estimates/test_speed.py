import itertools
from types import SimpleNamespace

import pytest

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.estimates import speed as speed_module
from assay.estimates.speed import Speed


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float64", None), ("bfloat16", None), ("float64", "bfloat16")]
)
def test_probe_measures_a_positive_speed(dtype: str, stored: str | None) -> None:
    speed = Speed.probe(open_run(parse_run("cpu/float32")), dtype, stored)

    assert 0 < speed.weight < 1e-6
    assert 0 < speed.product < 1e-7


def test_time_of_a_product_is_that_of_one_weight_and_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(speed_module, "time", clock)
    monkeypatch.setattr(speed_module, "_ROWS", 16)
    monkeypatch.setattr(speed_module, "_COLUMNS", 32)

    speed = Speed.probe(open_run(parse_run("cpu/float32")), "float32")

    # Each product takes a second: 512 weights, by 4 or by 64 tokens.
    assert speed.weight == 1 / 512
    assert speed.product == 1 / 512 / 64
