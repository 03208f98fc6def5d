import pytest

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.estimates.speed import Speed


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_probe_measures_a_positive_speed(dtype: str) -> None:
    speed = Speed.probe(open_run(parse_run("cpu/float32")), dtype)

    assert 0 < speed.weight < 1e-6
    assert 0 <= speed.product < 1e-7
