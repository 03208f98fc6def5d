"""An engine that keeps hidden state and residual apart, against a model that adds them."""

import pytest
import torch
from torch import Tensor

from assay.dumps.protocol import Dump
from assay.offline.check import Compared, CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import make_dump

Values = dict[tuple[str, str, int], Tensor]
LAYERS = ("layers.0", "layers.1", "layers.2")


def states() -> list[tuple[Tensor, Tensor]]:
    """Return hidden state and residual after each layer, and before the first."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, 5, 8, generator=generator), torch.randn(1, 5, 8, generator=generator))
        for _ in range(len(LAYERS) + 1)
    ]


def normed(value: Tensor) -> Tensor:
    return value / value.square().mean(-1, keepdim=True).sqrt()


def model() -> Dump:
    values: Values = {("embed", "input.input_ids", 0): torch.arange(5)[None]}
    before, *after = (hidden + residual for hidden, residual in states())
    for layer, value in zip(LAYERS, after, strict=True):
        values[f"{layer}.norm", "input.0", 0] = before
        values[f"{layer}.norm", "output", 0] = normed(before)
        values[layer, "input.hidden_states", 0] = before
        values[layer, "output", 0] = before = value
    return make_dump(values)


def engine(error: float = 0.0, *, flat: bool = False) -> Dump:
    """Return the dump of an engine. error: relative error of the second layer's hidden state."""
    values: Values = {("embed", "input.input_ids", 0): torch.arange(5)[None]}
    before, *after = states()
    for layer, (hidden, residual) in zip(LAYERS, after, strict=True):
        values[f"{layer}.norm", "input.0", 0], values[f"{layer}.norm", "input.1", 0] = before
        values[f"{layer}.norm", "output.0", 0] = normed(before[0] + before[1])
        values[f"{layer}.norm", "output.1", 0] = before[0] + before[1]
        values[layer, "input.hidden_states", 0], values[layer, "input.residual", 0] = before
        before = hidden * (1 + error * (layer == LAYERS[1])), residual
        values[layer, "output.0", 0], values[layer, "output.1", 0] = before
    if flat:
        values = {key: value[0] for key, value in values.items()}
    return make_dump(values)


def compare(expected: Dump, actual: Dump) -> Compared:
    return compare_dumps(CompareOptions("a", "b"), expected, actual, SilentProgress())


@pytest.mark.parametrize("flat", [False, True])
def test_sums_agree_whichever_side_keeps_them_apart(flat: bool) -> None:
    verdict = compare(model(), engine(flat=flat)).verdict
    assert verdict.verdict is Outcome.PASS, verdict.unmatched
    assert any("ACTUAL keeps hidden states and residuals apart" in one for one in verdict.notes)
    assert verdict.compared == 13

    verdict = compare(engine(flat=flat), model()).verdict
    # The model has no second result of its norms.
    assert verdict.unmatched.expected == [f"{layer}.norm:output.1" for layer in LAYERS]
    assert str(verdict.headline).startswith("Everything with a partner agrees (13 tensors)")


def test_both_sides_apart_are_compared_as_they_are() -> None:
    verdict = compare(engine(), engine()).verdict
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes == compare(model(), model()).verdict.notes


def test_a_wrong_hidden_state_is_found_in_its_layer() -> None:
    verdict = compare(model(), engine(0.02)).verdict
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.1"
