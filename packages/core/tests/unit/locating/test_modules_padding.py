"""Padding under replay: what is in it is nobody's business, in a value, a cache or positions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparing.judge import find_nonfinite_padding
from assay.hooks.row_positions import BatchPositions
from assay.stages import Stage
from packages.core.tests.unit.locating.conftest import MakeRig, Rig
from packages.core.tests.unit.locating.plants import do_nothing, replace_forward


def spoil_pads(tensor: Tensor) -> Tensor:
    """Garbage where prompt 0 has padding; nothing where the call has none."""
    if tensor.shape[1] != 32:
        return tensor
    spoiled = tensor.clone()
    spoiled[0, :12] = 1e4
    return spoiled


@pytest.mark.parametrize(
    "path", ["model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"]
)
def test_garbage_in_padding_is_no_error(llama_rig: Rig, path: str) -> None:
    plant = replace_forward(
        path, lambda _module, original, x, **kwargs: spoil_pads(original(x, **kwargs))
    )

    assert llama_rig.failed(plant) == set()


def test_padding_that_is_not_finite_is_kept_in_mind_where_it_is_written(llama_rig: Rig) -> None:
    path = "model.layers.0.mlp.up_proj"

    def spoil(_module: Any, original: Any, x: Tensor) -> Tensor:
        output: Tensor = original(x)
        return spoil_pads(output).masked_fill(spoil_pads(torch.zeros_like(output)) > 0, math.nan)

    assert llama_rig.failed(replace_forward(path, spoil)) == set()
    nonfinite_padding = find_nonfinite_padding(llama_rig.replay(replace_forward(path, spoil)))
    assert nonfinite_padding is not None
    assert nonfinite_padding.stage == Stage(path)
    assert find_nonfinite_padding(llama_rig.replay()) is None


def test_garbage_in_the_padding_of_a_cache_is_no_error(llama_rig: Rig) -> None:
    def forward(
        _module: Any, original: Any, *args: Any, past_key_values: Any, **kwargs: Any
    ) -> Any:
        output = original(*args, past_key_values=past_key_values, **kwargs)
        layer = past_key_values.layers[0]
        if layer.keys.shape[-2] == 32:
            layer.keys = layer.keys.clone()
            layer.keys[0, :, :12] = 1e4
        return output

    plant = replace_forward("model.layers.0.self_attn", forward)

    assert llama_rig.failed(plant) == set()


def test_same_garbage_in_a_token_is_an_error(llama_rig: Rig) -> None:
    def spoil_token(tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled[0, -1] += 1.0
        return spoiled

    path = "model.layers.0.mlp.up_proj"
    plant = replace_forward(path, lambda _module, original, x: spoil_token(original(x)))

    assert llama_rig.failed(plant) == {path}


def test_positions_of_padding_are_nobody_s_business(make_rig: MakeRig, llama: nn.Module) -> None:
    at_padding = [0]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    timeline = BatchPositions.of_batch(tuple(range(len(mask))), mask, 0)

    def loop(model: Any) -> None:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, at_padding[0])
        ids = torch.arange(10).reshape(2, 5)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)

    rig = make_rig(llama, loop, timeline=timeline)
    rig.judge()
    at_padding[0] = 1

    assert rig.failed(do_nothing) == set()
