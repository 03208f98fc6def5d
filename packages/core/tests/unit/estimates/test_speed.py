import itertools
from types import SimpleNamespace

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
def test_probe_measures_a_positive_speed(dtype: str, stored: str | None) -> None:
    speed = Speed.probe(open_run(parse_run("cpu/float32")), dtype, PRODUCTS, stored)

    assert 0 < speed.weight < 1e-6
    assert 0 < speed.product < 1e-7


@pytest.mark.parametrize(
    ("product", "seconds"),
    [
        # An eighth of the weight fits, and takes a second.
        (Product((256, 512), is_transposed=True), 8),
        # Four of the sixteen that fit are multiplied in a second.
        (Product((16, 64), is_transposed=False, count=4), 1 / 4),
    ],
)
def test_time_of_what_fits_is_scaled_to_one_weight(
    product: Product, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(speed_module, "time", clock)
    monkeypatch.setattr(speed_module, "_PROBED_ELEMENTS", 1 << 14)

    speed = Speed.probe(open_run(parse_run("cpu/float32")), "float32", [product])

    assert speed.weight * product.num_weights == pytest.approx(seconds)
    assert speed.product == pytest.approx(speed.weight / 4096)  # any number takes as long


def test_products_are_timed_with_as_many_tokens_as_take_longer_than_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A GPU: 512 tokens take as long as reading the weight.
    monkeypatch.setattr(speed_module._Weights, "time", lambda _self, _one, tokens: max(512, tokens))

    speed = Speed.probe(
        open_run(parse_run("cpu/float32")), "float32", [Product((1, 1), is_transposed=False)]
    )

    assert (speed.weight, speed.product) == (512, 1)


def test_gradient_of_tokens_is_a_product_with_the_transposed_weight() -> None:
    product = Product((256, 512), is_transposed=True, count=4)

    assert product.backward == Product((512, 256), is_transposed=False, count=4)
    assert product.backward.backward == product


def test_new_value_takes_a_positive_time() -> None:
    assert 0 < seconds_per_new_value(open_run(parse_run("cpu/float32")), "float64") < 1e-6
