"""Faults in projections: the product itself, its weights, its parts on other ranks.

Functions that scale outputs work in double precision and round once: scaled after it was rounded,
an output would hardly change in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

LAYER = 1


def down_weights_2_percent(model: Any) -> None:
    """Weights are 2 % too large."""
    _change_weights(model, "mlp.down_proj", lambda weight: weight * 1.02)


def output_weights_2_percent(model: Any) -> None:
    """Weights are 2 % too large."""
    _change_weights(model, "self_attn.o_proj", lambda weight: weight * 1.02)


def output_weights_half_percent(model: Any) -> None:
    """Weights are 0.5 % too large."""
    _change_weights(model, "self_attn.o_proj", lambda weight: weight * 1.005)


def down_outputs_1_per_mille(model: Any) -> None:
    """Outputs are 0.1 % too large."""
    _scale_outputs(model, "mlp.down_proj", 1.001)


def query_outputs_1_per_mille(model: Any) -> None:
    """Outputs are 0.1 % too large."""
    _scale_outputs(model, "self_attn.q_proj", 1.001)


def output_outputs_half_per_mille(model: Any) -> None:
    """Outputs are 0.05 % too large."""
    _scale_outputs(model, "self_attn.o_proj", 1.0005)


def value_outputs_2_per_mille(model: Any) -> None:
    """Outputs are 0.2 % too large."""
    _scale_outputs(model, "self_attn.v_proj", 1.002)


def one_channel_scaled(model: Any) -> None:
    """One output channel is 1 % too large."""
    projection = _projection(model, "self_attn.k_proj")
    device = projection.weight.device
    factors = torch.ones(projection.out_features, dtype=torch.float64, device=device)
    factors[7] = 1.01
    _multiply(projection, lambda x, weight: linear(x, weight) * factors)


def last_term_dropped(model: Any) -> None:
    """The sum ends one term early."""
    projection = _projection(model, "self_attn.q_proj")
    _multiply(projection, lambda x, weight: linear(x[..., :-1], weight[:, :-1]))


def half_of_the_sum_lost(model: Any) -> None:
    """The all-reduce of a row-parallel projection is missing: half of the inputs do not count."""
    projection = _projection(model, "self_attn.o_proj")
    half = projection.in_features // 2
    _multiply(projection, lambda x, weight: linear(x[..., :half], weight[:, :half]))


def shards_exchanged(model: Any) -> None:
    """A column-parallel projection gathers its halves in the wrong order."""
    projection = _projection(model, "self_attn.v_proj")
    half = projection.out_features // 2
    _multiply(projection, lambda x, weight: linear(x, weight).roll(half, -1))


def bias_added(model: Any) -> None:
    """A bias is added that the model does not have: 1 % of the typical output."""
    projection = _projection(model, "self_attn.k_proj")
    bias = 0.01 * projection.weight.double().norm(dim=1).mean()
    _multiply(projection, lambda x, weight: linear(x, weight) + bias)


def zero_point_off_by_one(model: Any) -> None:
    """vllm#38966: weights in 4 bits, their zero point off by one."""

    def change(weight: Tensor) -> Tensor:
        scale = weight.abs().amax() / 7
        return ((weight / scale).round() - 1) * scale

    _change_weights(model, "self_attn.v_proj", change)


def weights_in_8_bits(model: Any) -> None:
    """Weights are rounded to 8 bits with one scale for the tensor, which is not declared."""

    def change(weight: Tensor) -> Tensor:
        scale = weight.abs().amax() / 127
        return (weight / scale).round() * scale

    _change_weights(model, "self_attn.q_proj", change)


def transposed(model: Any) -> None:
    """A square weight is transposed: a wrong conversion."""
    _change_weights(model, "self_attn.q_proj", lambda weight: weight.T)


def neighbours_weights(model: Any) -> None:
    """A layer has the weights of the next one."""
    other = model.model.layers[LAYER + 1].self_attn.v_proj.weight
    _change_weights(model, "self_attn.v_proj", lambda _: other)


def one_weight_flipped(model: Any) -> None:
    """One weight has the wrong sign: a flipped bit."""

    def change(weight: Tensor) -> Tensor:
        flipped = weight.clone()
        row, column = divmod(int(weight.abs().argmax()), weight.shape[1])
        flipped[row, column] *= -1
        return flipped

    _change_weights(model, "self_attn.o_proj", change)


def _projection(model: Any, name: str) -> Any:
    return model.model.layers[LAYER].get_submodule(name)


def _change_weights(model: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
    weight = _projection(model, name).weight
    changed = change(weight.detach().double()).to(weight.dtype)
    assert not torch.equal(changed, weight)
    with torch.no_grad():
        weight.copy_(changed)


def _scale_outputs(model: Any, name: str, factor: float) -> None:
    _multiply(_projection(model, name), lambda x, weight: linear(x, weight) * factor)


def _multiply(projection: Any, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight = projection.weight.detach().double()
    projection.forward = lambda input: multiply(input.double(), weight).to(input.dtype)  # noqa: A006
