"""Faults by another author than the rules: in backward, by setup functions."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rope_turned_forwards_in_backward(model: Any) -> None:
    """The backward of a fused rotation turns by the angle, not by its negative."""
    from transformers.models.llama import modeling_llama

    attention, original = model.model.layers[1].self_attn, modeling_llama.apply_rotary_pos_emb
    inside: list[Any] = []

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        if not inside:
            return original(q, k, cos, sin, *rest, **named)
        right = original(q, k, cos, sin, *rest, **named)
        # The derivative of what is turned by the other angle, with the values of the right one.
        wrong = original(q, k, cos, -sin, *rest, **named)
        return tuple(w + (r - w).detach() for r, w in zip(right, wrong, strict=True))

    forward = attention.forward

    def mark(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return forward(*args, **kwargs)
        finally:
            inside.pop()

    attention.forward = mark
    modeling_llama.apply_rotary_pos_emb = rotate


def product_without_gate_in_backward(model: Any) -> None:
    """A fused silu(gate) * up whose gradient for up takes the gate before its activation."""
    mlp = model.model.layers[1].mlp

    def forward(x: Tensor) -> Any:
        gate = mlp.gate_proj(x)
        return mlp.down_proj(_FusedProduct.apply(mlp.act_fn(gate), mlp.up_proj(x), gate.detach()))  # type: ignore[no-untyped-call]

    mlp.forward = forward


def last_norm_by_raw_input(model: Any) -> None:
    """A fused norm: its weight's gradient takes the input, not the normalised input."""
    norm = model.model.norm

    def forward(x: Tensor) -> Any:
        root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        normalised = (x.float() * root).to(x.dtype)
        return _NormTimesWeight.apply(normalised, norm.weight, x.detach())  # type: ignore[no-untyped-call]

    norm.forward = forward


def one_query_head_scaled(model: Any) -> None:
    """The softmax scale is applied once too often to one head's dQ, in a tenth of its blocks."""
    projection = model.model.layers[2].self_attn.q_proj
    forward = projection.forward

    def change(x: Tensor) -> Tensor:
        queries: Tensor = forward(x)
        head = queries[..., 48:72]
        halved = 0.9 * head + 0.1 * head.detach()
        return torch.cat([queries[..., :48], halved, queries[..., 72:]], -1)

    projection.forward = change


def mlp_branch_detached(model: Any) -> None:
    """The MLP of one layer gets a detached tensor: no gradient flows back through its input."""
    mlp = model.model.layers[2].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x.detach())


def up_input_saved_in_8_bits(model: Any) -> None:
    """Compressed activations: what a linear keeps for backward is rounded to 8 bits."""
    projection = model.model.layers[0].mlp.up_proj
    projection.forward = lambda x: _LinearOfRoundedInput.apply(x, projection.weight)  # type: ignore[no-untyped-call]


class _FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activated: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(up, gate)
        return activated * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        up, gate = ctx.saved_tensors
        return gradient * up, gradient * gate, None


class _NormTimesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, normalised: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return weight * normalised

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1)), None


class _LinearOfRoundedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rounded, weight = ctx.saved_tensors
        x = rounded.to(gradient.dtype).flatten(0, -2)
        return gradient @ weight, gradient.flatten(0, -2).T @ x
