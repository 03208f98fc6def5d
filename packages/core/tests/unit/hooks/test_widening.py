from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.hooks import widening
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.widening import widen_on_use
from assay.models import load_model

IDS = torch.tensor([[5, 7, 11, 2, 9]])


@pytest.fixture(autouse=True)
def small_weights_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "SMALL_ELEMENTS", 1000)


@pytest.mark.parametrize("recipe", ["llama", "gemma2", "mixtral", "bert", "gpt-bigcode"])
def test_model_that_widens_on_use_computes_what_a_wide_one_does(recipe: str) -> None:
    name = f"micro:{recipe}"
    load = partial(load_model, name, attention="eager", experts="eager")
    wide = load(dtype="float64", rounded_to="bfloat16").model
    narrow = load(dtype="bfloat16").model
    before = {key: value.clone() for key, value in narrow.state_dict().items()}
    widen_on_use(narrow, torch.float64)

    with torch.no_grad():
        expected, actual = wide(input_ids=IDS).logits, narrow(input_ids=IDS).logits

    assert actual.dtype is torch.float64
    assert torch.equal(actual, expected)
    large = {key: value for key, value in before.items() if value.numel() > 1000}
    assert large
    for key, value in large.items():
        kept = narrow.state_dict()[key]
        assert kept.dtype is torch.bfloat16
        assert torch.equal(kept, value)


def test_weights_are_narrow_again_after_an_error() -> None:
    model = load_model("micro:llama", dtype="bfloat16").model
    widen_on_use(model, torch.float64)
    head = model.get_submodule("lm_head")

    with pytest.raises(RuntimeError), torch.no_grad():
        head(torch.zeros(1, 3))

    assert model.get_parameter("lm_head.weight").dtype is torch.bfloat16


class Table(nn.Module):
    """Returns a part of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32).bfloat16())

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


def test_result_that_is_a_part_of_a_weight_keeps_its_values() -> None:
    model = nn.ModuleList([Table(), Table()])
    expected = model[0].get_parameter("weight")[:3].double()
    widen_on_use(model, torch.float64)

    with torch.no_grad():
        first, _ = model[0](3), model[1](3)

    assert torch.equal(first, expected)


def test_widening_does_not_count_as_reading_a_weight() -> None:
    model = load_model("micro:llama", dtype="bfloat16").model
    gate: Any = model.get_submodule("model.layers.0.mlp.gate_proj")
    gate.forward = lambda x: x.new_zeros(*x.shape[:-1], gate.out_features)
    widen_on_use(model, torch.float64)
    watch = UsageWatch(NullHandler())
    watch.add_parameters_of(model)

    with ModuleTracer(watch).attached(model), watch.reading(), torch.no_grad():
        model(input_ids=IDS)

    read = watch.to_json()["read"]
    assert "model.layers.0.mlp.up_proj.weight" in read
    assert "model.layers.0.mlp.gate_proj.weight" not in read
