"""Faults in rotary position embeddings, each beside the same code without it."""

import math
import sys
from typing import Any

import torch
from torch import Tensor

LAYER = 1


def rotated_in_bfloat16(model: Any) -> None:
    """TransformerEngine#1245: queries, keys, tables and products are rounded to bfloat16."""
    _rotate_one_layer(model, torch.bfloat16)


def rotated(model: Any) -> None:
    """No fault."""
    _rotate_one_layer(model, None)


def theta_of_moved_key(model: Any) -> None:
    """DeepSpeed#8345: rope_theta has moved into rope_parameters, a default is read instead."""
    _set_theta(model, getattr(model.config, "rope_theta", 10000.0))


def theta(model: Any) -> None:
    """No fault."""
    _set_theta(model, model.config.rope_parameters["rope_theta"])


def yarn_factor_squared(model: Any) -> None:
    """sglang#33558: the attention factor of YaRN is applied twice."""
    model.model.rotary_emb.attention_scaling = _yarn_factor(model) ** 2


def yarn_factor(model: Any) -> None:
    """No fault."""
    model.model.rotary_emb.attention_scaling = _yarn_factor(model)


def _yarn_factor(model: Any) -> float:
    return 0.1 * math.log(model.config.rope_parameters["factor"]) + 1.0


def _set_theta(model: Any, base: float) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    exponents = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
    with torch.no_grad():
        frequencies.copy_(1.0 / base**exponents)


def _rotate_one_layer(model: Any, rounded_to: torch.dtype | None) -> None:
    attention = model.model.layers[LAYER].self_attn
    modeling: Any = sys.modules[type(attention).__module__]
    attend = attention.forward

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos[:, None], sin[:, None]

        def turn(x: Tensor) -> Tensor:
            low, high = x.chunk(2, -1)
            products = (
                _round(_round(x, rounded_to) * _round(cos, rounded_to), rounded_to),
                _round(
                    _round(torch.cat((-high, low), -1), rounded_to) * _round(sin, rounded_to),
                    rounded_to,
                ),
            )
            return products[0] + products[1]

        return turn(q), turn(k)

    def forward(*args: Any, **kwargs: Any) -> Any:
        original = modeling.apply_rotary_pos_emb
        modeling.apply_rotary_pos_emb = rotate
        try:
            return attend(*args, **kwargs)
        finally:
            modeling.apply_rotary_pos_emb = original

    attention.forward = forward


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)
