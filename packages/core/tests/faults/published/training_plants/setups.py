"""Faults of a model that is trained, by setup functions, each beside the same code without it.

Shapes: B rows, H heads, T queries, S keys, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LAYER = 1

# Of a gradient, what goes on.
Change = Callable[[Tensor], Tensor]


def columns_of_values_misaligned(model: Any) -> None:
    """flash-attention#2552: a few columns of dV are written where their neighbours belong."""

    def change(gradient: Tensor) -> Tensor:
        wrong = gradient.clone()
        wrong[..., 16:20] = gradient[..., 12:16]
        return wrong

    _change_gradients(model, value=change)


def queries_300_times(model: Any) -> None:
    """flash-attention#2623: dQ of a block-sparse kernel is hundreds of times too large."""
    _change_gradients(model, query=lambda gradient: gradient * 300)


def gradients_as_they_are(model: Any) -> None:
    """No fault."""
    _change_gradients(model)


def heads_summed_by_remainder(model: Any) -> None:
    """native-sparse-attention#27: in backward a query's head h belongs to the keys of h % share."""

    def fold(gradient: Tensor, num_heads: int) -> Tensor:
        share = gradient.shape[1] // num_heads
        heads = torch.arange(gradient.shape[1], device=gradient.device) % share
        rows, _, *rest = gradient.shape
        summed = gradient.new_zeros(rows, max(share, num_heads), *rest)
        return summed.index_add(1, heads, gradient)[:, :num_heads]

    _repeat_heads_by(model, fold)


def heads_summed_by_group(model: Any) -> None:
    """No fault."""

    def fold(gradient: Tensor, num_heads: int) -> Tensor:
        rows, _, *rest = gradient.shape
        return gradient.reshape(rows, num_heads, -1, *rest).sum(2)

    _repeat_heads_by(model, fold)


def part_of_norm_gradient_stale(model: Any) -> None:
    """pytorch#193061: one slice of a gradient is a buffer that was not written this time."""
    before: list[Tensor] = []

    def change(gradient: Tensor) -> Tensor:
        stale = gradient.clone()
        stale[:16] = before[0][:16] if before else 0
        before[:] = [gradient.clone()]
        return stale

    _norm(model).weight.register_hook(change)


def norm_gradient_written(model: Any) -> None:
    """No fault."""
    _norm(model).weight.register_hook(lambda gradient: gradient.clone())


def half_of_bias_detached(model: Any) -> None:
    """torchtitan#4332: each of two ranks adds half of the bias, whose gradient is halved too."""
    _add_bias_of_two_ranks(model, lambda half: half.detach())


def both_halves_of_bias_kept(model: Any) -> None:
    """No fault."""
    _add_bias_of_two_ranks(model, lambda half: half)


def window_lost_in_training(model: Any) -> None:
    """unsloth#8253: the path of training is causal, and has no window."""
    _attend_causally(model, lambda mask, causal: causal if model.training else mask)


def window_kept_in_training(model: Any) -> None:
    """No fault."""
    _attend_causally(model, lambda mask, _: mask)


def temperature_missing(model: Any) -> None:
    """trl#3029: log-probabilities are those of the logits before they are divided."""
    model.config.logits_scaling = 1.0


def temperature(model: Any) -> None:
    """No fault."""
    model.config.logits_scaling = float(model.config.logits_scaling)


def aux_loss_not_attached(model: Any) -> None:
    """Automodel#1412: what attaches the auxiliary loss to the graph is called, its result dropped."""
    gate = _gate(model)
    attach = gate.attach

    def drop(weights: Tensor, loss: Tensor) -> Tensor:
        attach(weights, loss)
        return weights

    gate.attach = drop


def aux_loss_twice(model: Any) -> None:
    """Megatron-LM#5047: the auxiliary loss is scaled by the ranks that share its tokens."""
    gate = _gate(model)
    attach = gate.attach
    gate.attach = lambda weights, loss: attach(weights, loss * 2)


def aux_loss_attached(model: Any) -> None:
    """No fault."""
    gate = _gate(model)
    attach = gate.attach
    gate.attach = lambda weights, loss: attach(weights, loss * 1)


def load_counted_again_in_backward(model: Any) -> None:
    """Automodel#3247: a recomputed gate adds to the count of its tokens once more."""
    _gate(model).is_recomputed = lambda: False


def load_counted_once(model: Any) -> None:
    """No fault."""
    gate = _gate(model)
    assert not gate.is_recomputed()


class _Through(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


class _Repeated(torch.autograd.Function):
    """Heads of keys or values, each for its share of the heads of queries."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, share: int, fold: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        ctx.num_heads, ctx.fold = heads.shape[1], fold
        return heads.repeat_interleave(share, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.fold(gradient, ctx.num_heads), None, None


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _change_gradients(model: Any, query: Change = _as_it_is, value: Change = _as_it_is) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, share: int, scaling: float) -> Tensor:
        q, v = _through(q, query), _through(v, value)
        return _attend(
            q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), mask, scaling
        )

    _replace(model, attend)


def _repeat_heads_by(model: Any, fold: Callable[[Tensor, int], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, share: int, scaling: float) -> Tensor:
        keys, values = (_Repeated.apply(x, share, fold) for x in (k, v))  # type: ignore[no-untyped-call]
        return _attend(q, keys, values, mask, scaling)

    _replace(model, attend)


def _attend_causally(model: Any, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, share: int, scaling: float) -> Tensor:
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        keys, values = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        return _attend(q, keys, values, choose(mask, causal), scaling)

    _replace(model, attend)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    scores_BHTS = q @ k.transpose(2, 3)
    scores_BHTS = scores_BHTS.to(torch.promote_types(scores_BHTS.dtype, torch.float32)) * scaling
    lowest = torch.finfo(torch.bfloat16).min  # finite, in every dtype
    return scores_BHTS.masked_fill(~allowed, lowest).softmax(-1).to(v.dtype) @ v


def _replace(model: Any, attend: Callable[..., Tensor]) -> None:
    """Let layer LAYER attend by `attend`."""
    name = model.config._attn_implementation
    attention, original = model.model.layers[LAYER].self_attn, ALL_ATTENTION_FUNCTIONS[name]

    def planted(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if module is not attention:
            return original(module, query, key, value, mask, **kwargs)
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
        allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
        result = attend(query, key, value, allowed, module.num_key_value_groups, module.scaling)
        return result.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS[name] = planted


def _through(value: Tensor, change: Change) -> Tensor:
    result: Tensor = _Through.apply(value, change)  # type: ignore[no-untyped-call]
    return result


def _add_bias_of_two_ranks(model: Any, keep: Callable[[Tensor], Tensor]) -> None:
    projection = model.model.layers[LAYER].self_attn.o_proj

    def forward(x: Tensor) -> Tensor:
        half = projection.bias / 2
        return linear(x, projection.weight, half + keep(half))

    projection.forward = forward


def _norm(model: Any) -> Any:
    return model.model.layers[LAYER].input_layernorm


def _gate(model: Any) -> Any:
    return model.model.layers[LAYER].mlp.gate
