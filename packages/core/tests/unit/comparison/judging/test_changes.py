"""Simple changes that explain a difference."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
