"""Faults in backward: what forward computes is right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYER = 1


def key_head_detached(model: Any) -> None:
    """SkyRL#1886: a kernel drops the gradient of one key head."""
    _change_results(_attention(model).k_proj, _detach_head)


def value_head_detached(model: Any) -> None:
    """The same of the values."""
    _change_results(_attention(model).v_proj, _detach_head)


def key_gradient_2_percent(model: Any) -> None:
    """dK is scaled: the softmax scale is applied twice over part of the block."""
    _change_results(_attention(model).k_proj, lambda keys: scale_gradient(keys, 1.02))


def down_gradient_5_per_mille(model: Any) -> None:
    """A matrix product of backward with a wrong scale."""
    _change_results(_layer(model).mlp.down_proj, lambda x: scale_gradient(x, 1.005))


def norm_weights_detached_on_half(model: Any) -> None:
    """Megatron-LM#1446: norms are not reduced, half of the tokens are missing everywhere."""
    norms = [m for name, m in model.named_modules() if name.endswith("norm")]
    for norm in norms:
        _detach_on_half(norm)


def one_norm_detached_on_half(model: Any) -> None:
    """The same of one norm."""
    _detach_on_half(_layer(model).input_layernorm)


def norm_without_gradient_of_root(model: Any) -> None:
    """A fused norm whose backward forgets that the root depends on the input."""
    norm = _layer(model).post_attention_layernorm

    def forward(x: Tensor) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (wide * root.detach()).to(x.dtype)

    norm.forward = forward


def residual_detached(model: Any) -> None:
    """One layer's residual carries no gradient."""
    layer = _layer(model)
    original = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(hidden_states, *args, **kwargs)
        return result - hidden_states + hidden_states.detach()

    layer.forward = forward


def embedding_gradient_of_padding_token(model: Any) -> None:
    """One token's row of the embedding gets no gradient, as if it were padding."""
    model.model.embed_tokens.padding_idx = 32


def sigmoid_gradient_wrong(model: Any) -> None:
    """A SiLU whose backward is that of the sigmoid alone."""
    activation = _layer(model).mlp.act_fn
    activation.forward = lambda x: x.detach() * torch.sigmoid(x)


def activation_gradient_in_bfloat16(model: Any) -> None:
    """Gradients of an activation are rounded to 8 bits on their way."""
    _change_results(_layer(model).mlp.act_fn, round_gradient)


def embedding_frozen(model: Any) -> None:
    """The embedding does not ask for gradients."""
    model.model.embed_tokens.weight.requires_grad_(False)


def down_weights_2_percent(model: Any) -> None:
    """Weights that are not the reference's."""
    with torch.no_grad():
        _layer(model).mlp.down_proj.weight.mul_(1.02)


def down_outputs_2_percent(model: Any) -> None:
    """A kernel with a wrong scale, forwards and backwards."""
    _change_results(_layer(model).mlp.down_proj, lambda x: x * 1.02)


class _Changed(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


def scale_gradient(value: Tensor, factor: float) -> Any:
    """In float64, then rounded: 1.005 itself is 1.0078 in bfloat16."""
    return _Changed.apply(value, lambda g: (g.double() * factor).to(g.dtype))  # type: ignore[no-untyped-call]


def round_gradient(value: Tensor) -> Any:
    return _Changed.apply(value, lambda g: g.bfloat16().to(g.dtype))  # type: ignore[no-untyped-call]


def _layer(model: Any) -> Any:
    return model.model.layers[LAYER]


def _attention(model: Any) -> Any:
    return _layer(model).self_attn


def _change_results(module: Any, change: Callable[[Tensor], Any]) -> None:
    original = module.forward
    module.forward = lambda *args, **kwargs: change(original(*args, **kwargs))


def _detach_head(projected: Tensor, size: int = 24) -> Tensor:
    return torch.cat([projected[..., :size].detach(), projected[..., size:]], dim=-1)


def _detach_on_half(norm: Any) -> None:
    def forward(x: Tensor) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        normalised = (wide * root).to(x.dtype)
        half = x.shape[1] // 2
        return torch.cat(
            [norm.weight.detach() * normalised[:, :half], norm.weight * normalised[:, half:]], 1
        )

    norm.forward = forward
