"""Simple changes that explain a difference."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.judge.value_changes import OF_RESULT, OF_WEIGHT, Proof, describe_values
from assay.runs import SilentProgress
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump

ORDERS = {"rows": 0, "columns": 1}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def describe(
    actual: Tensor, expected: Tensor, nouns: tuple[str, str] = OF_WEIGHT, noise: float = 1e-6
) -> str:
    return describe_values(actual, expected, Proof(noise, 2.0**-24), nouns)


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.1, "It is 1.1 times the expected one."),
        (1.0003, "It is 1.0003 times the expected one."),
        (-1.0, "It is -1.0 times the expected one."),
        (0.0, "It is zero."),
    ],
)
def test_a_factor_is_stated(factor: float, text: str) -> None:
    weight = random(16, 12)
    assert describe(factor * weight, weight) == text


def test_a_factor_of_a_bfloat16_weight_is_stated() -> None:
    weight = random(64, 64).bfloat16()
    actual = (1.02 * weight.float()).bfloat16().float()
    proof = Proof(4 * 2.0**-8, 2.0**-8)
    assert describe_values(actual, weight.float(), proof, OF_WEIGHT) == (
        "It is 1.02 times the expected one."
    )


def test_a_factor_of_some_rows_and_columns_counts_them() -> None:
    expected = random(16, 12)
    actual = expected.clone()
    actual[2:5] *= 1.5
    assert describe(actual, expected) == "It is 1.5 times the expected one in 3 of 16 rows."
    actual = expected.clone()
    actual[2:5, :6] *= 1.5
    assert describe(actual, expected, OF_RESULT) == (
        "It is 1.5 times the expected one in 3 of 16 tokens and 6 of 12 channels."
    )


def test_a_factor_with_a_rest_beyond_noise_is_not_stated() -> None:
    expected = random(16, 12)
    assert not describe(1.1 * expected + 1e-4 * random(16, 12, seed=1), expected)


@pytest.mark.parametrize("noise", [1e-6, 0.1])
def test_an_added_difference_is_not_described(noise: float) -> None:
    """With 10% noise, half of the expected values and unrelated values may look like a factor."""
    expected = random(64, 32)
    for share in (0.2, 0.5, 1.0):
        assert not describe(expected + share * random(64, 32, seed=1), expected, OF_RESULT, noise)


def test_a_difference_within_noise_is_not_described() -> None:
    expected = random(16, 12)
    assert not describe(1.0000005 * expected, expected)


@pytest.mark.parametrize("noun", ["rows", "columns"])
def test_another_order_counts_what_moved(noun: str) -> None:
    expected = random(16, 12)
    actual = expected.roll(1, ORDERS[noun])
    size = expected.shape[ORDERS[noun]]
    text = f"Its {noun} are in another order: {size} of {size} moved."
    assert describe(actual, expected) == text


def test_two_rows_are_swapped() -> None:
    expected = random(16, 12)
    order = list(range(16))
    order[3], order[9] = 9, 3
    assert describe(expected[order], expected) == "Its rows 3 and 9 are swapped."
    assert describe(expected[order], expected, OF_RESULT) == (
        "Its tokens are in another order: 2 of 16 moved."
    )
    assert describe(expected.T[:, order], expected.T, OF_RESULT) == (
        "Its channels 3 and 9 are swapped."
    )


def test_rows_of_more_columns_than_directions_are_found() -> None:
    expected = random(200, 500)
    noisy = expected.flip(0) + 1e-3 * random(200, 500, seed=1)
    assert describe(noisy, expected, noise=1e-2) == (
        "Its rows are in another order: 200 of 200 moved."
    )


def test_a_vector_needs_the_same_values_in_another_order() -> None:
    expected = random(16, 1)
    assert describe(expected.flip(0), expected) == (
        "Its rows are in another order: 16 of 16 moved."
    )
    near = expected.flip(0) + 1e-5
    assert not describe(near, expected, noise=1e-3)


def test_repeated_rows_are_not_another_order() -> None:
    expected = random(16, 12)
    assert not describe(expected[torch.arange(16) // 2], expected)


def test_few_distinct_values_are_not_another_order() -> None:
    expected = torch.arange(16).remainder(3).float()[:, None].repeat(1, 12)
    assert not describe(expected.roll(1, 0), expected)


def test_a_transposed_weight_is_named() -> None:
    expected = random(12, 12)
    assert describe(expected.T, expected) == "It is the transpose of the expected one."
    assert not describe(expected.T, expected, OF_RESULT)


@pytest.mark.parametrize("shape", [(7, 12), (1, 64)])
def test_fewer_than_eight_rows_are_not_described(shape: tuple[int, int]) -> None:
    expected = random(*shape)
    assert not describe(1.1 * expected, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_not_described(value: float) -> None:
    expected = random(16, 12)
    actual = 1.1 * expected
    actual[3, 3] = value
    assert not describe(actual, expected)


def headline(expected: Values, actual: Values) -> str:
    sides = make_dump(expected), make_dump(actual)
    verdict = compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict
    return str(verdict.headline)


IDS = torch.arange(16)[None]
Layer = tuple[Tensor, Tensor]


def run(
    layers: Sequence[Layer], *, weights: bool = False, skipped: int = -1, names: Sequence[int] = ()
) -> dict[tuple[str, str, int], Tensor]:
    """Return the tensors of a model of layers with two projections. names: numbers of the layers."""
    hidden = random(1, 16, 12, seed=9)
    values = {("model.embed", "input.input_ids", 0): IDS, ("model.embed", "output", 0): hidden}
    for number, (up, down) in zip(names or range(len(layers)), layers, strict=True):
        path = f"model.layers.{number}"
        inner = torch.tanh(hidden @ up.T)
        result = hidden + inner @ down.T if number != skipped else hidden
        values |= {
            (f"{path}.up", "input.0", 0): hidden,
            (f"{path}.up", "output", 0): hidden @ up.T,
            (f"{path}.down", "input.0", 0): inner,
            (f"{path}.down", "output", 0): inner @ down.T,
            (path, "input.0", 0): hidden,
            (path, "output", 0): result,
        }
        if weights:
            values[f"{path}.up", "parameter.weight", 0] = up
            values[f"{path}.down", "parameter.weight", 0] = down
        hidden = result
    return values | {
        ("model", "input.input_ids", 0): IDS,
        ("model", "output", 0): hidden,
    }


LAYERS = [(random(12, 12, seed=n), random(12, 12, seed=n + 20)) for n in range(4)]


def end(expected: Values, actual: Values) -> str:
    return headline(expected, actual).partition("differs. ")[2]


def test_a_located_result_is_described() -> None:
    layers = [*LAYERS]
    layers[1] = layers[1][0], 1.1 * layers[1][1]
    assert headline(run(LAYERS), run(layers)) == (
        "model.layers.1.down (forward, step 0) is the first that differs. It is 1.1 times the expected one."
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda one: 0.5 * one, "It is 0.5 times the expected one."),
        (lambda one: one.flip(0), "Its rows are in another order: 12 of 12 moved."),
        (lambda one: one.T, "It is the transpose of the expected one."),
    ],
)
def test_a_located_weight_is_described(change: Callable[[Tensor], Tensor], text: str) -> None:
    layers = [*LAYERS]
    layers[1] = layers[1][0], change(layers[1][1]).contiguous()
    found = headline(run(LAYERS, weights=True), run(layers, weights=True))
    assert found.startswith("model.layers.1.down.weight differs in ")
    assert found.endswith(f". {text}")


def test_swapped_layers_are_named() -> None:
    layers = [LAYERS[0], LAYERS[2], LAYERS[1], LAYERS[3]]
    found = headline(run(LAYERS, weights=True), run(layers, weights=True))
    assert found.endswith(" It and model.layers.2.up:parameter.weight are swapped.")


def test_swapped_projections_are_named() -> None:
    """Both project the same values, so their results are swapped, too."""
    layers = [*LAYERS]
    layers[1] = layers[1][::-1]
    found = headline(run(LAYERS, weights=True), run(layers, weights=True))
    assert found.endswith(" It and model.layers.1.down:parameter.weight are swapped.")


def test_a_weight_of_another_layer_is_named() -> None:
    layers = [LAYERS[0], LAYERS[0], LAYERS[2], LAYERS[3]]
    found = headline(run(LAYERS, weights=True), run(layers, weights=True))
    assert found.endswith(" It holds the expected values of model.layers.0.up:parameter.weight.")


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_layer_is_named_by_the_weights(missing: int) -> None:
    layers = [one for number, one in enumerate(LAYERS) if number != missing]
    found = headline(run(LAYERS, weights=True), run(layers, weights=True))
    assert found.endswith(
        f" It holds the expected values of model.layers.{missing + 1}.up:parameter.weight:"
        f" ACTUAL lacks model.layers.{missing}."
    )


def test_a_layer_that_returns_its_input_is_named() -> None:
    assert end(run(LAYERS), run(LAYERS, skipped=1)) == "ACTUAL returns its input unchanged."


def test_a_layer_that_is_not_called_is_named() -> None:
    actual = run([LAYERS[0], LAYERS[2], LAYERS[3]], names=(0, 2, 3))
    assert end(run(LAYERS), actual) == (
        "model.layers.2.up gets the input that model.layers.1.up gets in EXPECTED:"
        " ACTUAL lacks model.layers.1."
    )


def test_layers_in_another_order_are_named() -> None:
    actual = run([LAYERS[0], LAYERS[2], LAYERS[1], LAYERS[3]], names=(0, 2, 1, 3))
    assert end(run(LAYERS), actual) == (
        "model.layers.2.up gets the input that model.layers.1.up gets in EXPECTED."
    )


def test_the_weights_of_untrained_norms_name_no_other_layer() -> None:
    """All of them hold ones, so equal values prove nothing."""
    expected = {(f"layers.{n}.norm", "parameter.weight", 0): torch.ones(16) for n in range(2)}
    expected["layers.1.norm", "parameter.weight", 0] = random(16)
    actual = expected | {("layers.1.norm", "parameter.weight", 0): torch.ones(16)}
    assert headline(expected, actual).endswith(": 1.0, expected -2.12.")


def test_only_the_first_pass_that_differs_is_described() -> None:
    """Later passes get other inputs."""
    values = run(LAYERS)
    expected = values | {(module, port, 1): one for (module, port, _), one in values.items()}
    layers = [*LAYERS]
    layers[1] = 1.1 * layers[1][0], layers[1][1]
    wrong = run(layers)
    later = {(module, port, 1): one + 0.01 for (module, port, _), one in values.items() if one.is_floating_point()}  # fmt: skip
    actual = expected | wrong | later
    assert end(expected, actual) == "It is 1.1 times the expected one."


def with_head(head: Tensor, *, is_shared: bool) -> Values:
    """Return the tensors of a model whose head may share the weight of its embedding."""
    table = random(16, 12)
    hidden = table[IDS]
    values = {
        ("embed", "input.input_ids", 0): IDS,
        ("embed", "parameter.weight", 0): table,
        ("embed", "output", 0): hidden,
        ("lm_head", "input.0", 0): hidden,
        ("lm_head", "output", 0): hidden @ head.T,
    }
    return values if is_shared else values | {("lm_head", "parameter.weight", 0): head}


def test_a_head_is_compared_with_the_embedding_that_it_shares_on_the_other_side() -> None:
    table = random(16, 12)
    shared, own = with_head(table, is_shared=True), with_head(table, is_shared=False)
    wrong = with_head(1.1 * table, is_shared=False)
    assert headline(shared, own).startswith(
        "The dumps agree in all 6 tensors; every value is equal."
    )
    assert headline(own, shared).startswith(
        "The dumps agree in all 6 tensors; every value is equal."
    )
    for expected, actual, factor in ((shared, wrong, "1.1"), (wrong, shared, "0.9091")):
        found = headline(expected, actual)
        assert found.startswith("lm_head.weight differs in 192 of 192 values")
        assert found.endswith(f" It is {factor} times the expected one.")
