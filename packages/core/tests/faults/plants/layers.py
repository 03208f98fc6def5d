"""Faults between projections: activations, gated products, residual sums, order."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LAYER = 2


def other_gelu(model: Any) -> None:
    """transformers#29402: the exact GELU instead of its approximation by tanh."""
    activation = model.model.layers[LAYER].mlp.act_fn
    activation.forward = functional.gelu


def sigmoid_scaled(model: Any) -> None:
    """SiLU with the factor 1.702 of the quick GELU."""
    activation = model.model.layers[LAYER].mlp.act_fn
    activation.forward = lambda input: input * torch.sigmoid(1.702 * input)  # noqa: A006


def activation_in_bfloat16(model: Any) -> None:
    """The exponential of SiLU is computed in bfloat16."""
    activation = model.model.layers[LAYER].mlp.act_fn

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        negative = torch.exp(-input.bfloat16())
        return input / (1 + negative).to(input.dtype)

    activation.forward = forward


def activation_saturates(model: Any) -> None:
    """Activations over 2 are cut off: the range of a narrow format."""
    activation = model.model.layers[LAYER].mlp.act_fn
    activate = activation.forward
    activation.forward = lambda input: activate(input).clamp(max=2.0)  # noqa: A006


def gate_and_up_exchanged(model: Any) -> None:
    """The activation is applied to the wrong one of two products."""
    mlp = model.model.layers[LAYER].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def product_not_a_number(model: Any) -> None:
    """One element of a gated product is NaN, in a decode step."""
    mlp = model.model.layers[LAYER].mlp

    def forward(x: Tensor) -> Any:
        product = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        if x.shape[1] == 1:
            product[0, 0, 5] = torch.nan
        return mlp.down_proj(product)

    mlp.forward = forward


def residual_2_percent(model: Any) -> None:
    """A layer's input is 2 % too large in its residual sum."""
    _replace_layer(model, lambda hidden_states: hidden_states * 1.02)


def residual_in_bfloat16(model: Any) -> None:
    """A layer's input is rounded to bfloat16 in its residual sum."""
    _replace_layer(model, lambda hidden_states: hidden_states.bfloat16().to(hidden_states.dtype))


def layer_skipped(model: Any) -> None:
    """A layer returns its input."""
    layer = model.model.layers[LAYER]
    layer.forward = lambda hidden_states, **_: hidden_states.clone()


def _replace_layer(model: Any, residual: Any) -> None:
    layer = model.model.layers[LAYER]

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        kept = residual(hidden_states)
        hidden_states, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden_states), **kwargs
        )
        if not hasattr(layer, "pre_feedforward_layernorm"):
            hidden_states = kept + hidden_states
            return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))
        hidden_states = kept + layer.post_attention_layernorm(hidden_states)
        result = layer.mlp(layer.pre_feedforward_layernorm(hidden_states))
        return hidden_states + layer.post_feedforward_layernorm(result)

    layer.forward = forward
