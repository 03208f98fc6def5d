"""Modules and calls that only one side of a replay has."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from packages.core.tests.unit.locating.conftest import MakeRig, Rig
from packages.core.tests.unit.locating.plants import replace_forward


def test_child_that_is_never_called_is_replaced_by_its_ancestor(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = F.silu(F.linear(x, module.gate_proj.weight)) * F.linear(x, module.up_proj.weight)
        return F.linear(gated, module.down_proj.weight)

    results = llama_rig.replay(replace_forward("model.layers.0.mlp", forward))

    assert sorted(results.uncalled_modules) == [
        f"model.layers.0.mlp.{name}" for name in ("act_fn", "down_proj", "gate_proj", "up_proj")
    ]
    assert results.unmatched_expected == []


def test_error_inside_of_a_replaced_child_is_found_at_its_ancestor(llama_rig: Rig) -> None:
    def forward(module: Any, _original: Any, x: Tensor) -> Any:
        gated = F.silu(F.linear(x, module.gate_proj.weight)) * F.linear(x, module.up_proj.weight)
        return F.linear(gated, 1.1 * module.down_proj.weight)

    plant = replace_forward("model.layers.0.mlp", forward)

    assert llama_rig.failed(plant) == {"model.layers.0.mlp"}


def test_layer_that_is_skipped_is_an_error_of_the_model(llama_rig: Rig) -> None:
    def plant(model: Any) -> None:
        del model.model.layers[1]
        model.config.num_hidden_layers = 1
        model.model.config.num_hidden_layers = 1

    assert "model" in llama_rig.failed(plant)


def test_decode_steps_that_are_not_made_are_missing(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    steps = [3]
    x = tensor(1, 4, 8)

    def loop(model: Any) -> None:
        for _ in range(steps[0]):
            model(x.to(next(model.parameters()).dtype))

    rig = make_rig(nn.Sequential(nn.Linear(8, 8)), loop)
    assert rig.replay().unmatched_expected == []
    steps[0] = 2

    assert rig.replay().unmatched_expected == ["(model)", "0"]


def test_calls_beyond_those_of_the_reference_are_listed(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    steps = [1]
    x = tensor(1, 4, 8)

    def loop(model: Any) -> None:
        for _ in range(steps[0]):
            model(x.to(next(model.parameters()).dtype))

    rig = make_rig(nn.Sequential(nn.Linear(8, 8)), loop)
    rig.replay()
    steps[0] = 2

    assert rig.replay().unmatched_actual == ["(model)", "0"]
