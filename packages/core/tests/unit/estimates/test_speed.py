import pytest

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.estimates import speed as speed_module
from assay.estimates.products import Product
from assay.estimates.speed import Speed, seconds_per_new_value

PRODUCTS = [
    Product((256, 512), is_transposed=True, count=4),
    Product((512, 64), is_transposed=False, count=2),
]


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float64", None), ("bfloat16", None), ("float64", "bfloat16")]
)
@pytest.mark.parametrize("elements", [1 << 20, 1 << 14])
def test_probe_measures_a_positive_speed(
    dtype: str, stored: str | None, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of weights that are larger than the probe's memory."""
    monkeypatch.setattr(speed_module, "_PROBED_ELEMENTS", elements)

    speed = Speed.probe(open_run(parse_run("cpu/float32")), dtype, PRODUCTS, stored)

    assert 0 < speed.weight < 1e-4
    assert 0 <= speed.product < 1e-4


def test_new_value_takes_a_positive_time() -> None:
    assert 0 < seconds_per_new_value(open_run(parse_run("cpu/float32")), "float64") < 1e-4
