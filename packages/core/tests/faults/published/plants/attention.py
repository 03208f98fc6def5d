"""Faults of attention kernels, beside `correct`: the same code without any of them.

Shapes: B rows, H heads, T queries, S keys, D head size.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LAYER = 1


@dataclass(frozen=True)
class Call:
    """One call of the attention of layer LAYER.

    query (B, H, T, D); key and value (B, H, S, D), repeated for the heads that share them.
    allowed: (B or 1, 1, T, S), True where a query may see a key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    scaling: float
    softcap: float | None

    @property
    def is_prefill(self) -> bool:
        return self.query.shape[2] > 1


def correct(model: Any) -> None:
    """No fault."""
    _replace(model, _attend)


def window_lost_in_prefill(model: Any) -> None:
    """sglang#33915: the window reaches decode and not the ragged prefill."""

    def attend(call: Call) -> Tensor:
        return _attend(replace(call, allowed=_without_window(call)) if call.is_prefill else call)

    _replace(model, attend)


def window_lost_in_decode(model: Any) -> None:
    """nanochat#452: a decode step sees 8 keys more than the window, out of a cache that has all."""
    _replace(model, _KeepsMore(num_more=8))


def window_kept_in_decode(model: Any) -> None:
    """No fault: the cache has all, and a decode step is given the window's part of it."""
    _replace(model, _KeepsMore(num_more=0))


def strides_ignored(model: Any) -> None:
    """pytorch#181133: memory of transposed tensors is read as if it were contiguous."""

    def attend(call: Call) -> Tensor:
        query, key, value = (_as_if_contiguous(x) for x in (call.query, call.key, call.value))
        return _attend(replace(call, query=query, key=key, value=value))

    _replace(model, attend, repeat=_repeat_by_strides)


def strides_kept(model: Any) -> None:
    """No fault: the same with the copies that the kernel needs."""

    def attend(call: Call) -> Tensor:
        query, key, value = (
            _as_if_contiguous(x.contiguous()) for x in (call.query, call.key, call.value)
        )
        return _attend(replace(call, query=query, key=key, value=value))

    _replace(model, attend, repeat=_repeat_by_strides)


def last_row_overflows(model: Any) -> None:
    """pytorch#197636: scores of the last row of a batch are shifted once there are very many."""

    def change(scores_BHTS: Tensor) -> Tensor:
        if scores_BHTS.shape[0] == 1 or scores_BHTS.numel() < 1 << 14:
            return scores_BHTS
        return torch.cat((scores_BHTS[:-1], scores_BHTS[-1:].roll(1, -1)))

    _replace(model, lambda call: _attend(call, change))


def softcap_dropped(model: Any) -> None:
    """vllm-metal#665, sglang#33915: the kernel is called with a cap of 0."""

    def attend(call: Call) -> Tensor:
        assert call.softcap
        return _attend(replace(call, softcap=None))

    _replace(model, attend)


def causal_from_the_top_left(model: Any) -> None:
    """openvino#36680, pytorch#108108: with a warm cache query i sees the keys 0 to i."""

    def attend(call: Call) -> Tensor:
        num_queries, num_keys = call.allowed.shape[-2:]
        if not call.is_prefill or num_queries == num_keys:
            return _attend(call)
        return _attend(replace(call, allowed=call.allowed.new_ones(num_queries, num_keys).tril()))

    _replace(model, attend)


def stale_slots_leak(model: Any) -> None:
    """vllm#57493: slots beyond the end, with values of earlier requests, count for a thousandth."""
    stale: list[Tensor] = []

    def attend(call: Call) -> Tensor:
        output_BHTD = _attend(call)
        if stale:
            output_BHTD = (output_BHTD.double() + 1e-3 * stale[0]).to(output_BHTD.dtype)
        stale[:] = [call.value.double().mean((0, 2), keepdim=True)]
        return output_BHTD

    _replace(model, attend)


def padded_rows_shifted(model: Any) -> None:
    """pytorch#147460: what a row with padding computes is 0.1 too large."""

    def attend(call: Call) -> Tensor:
        padded_B111 = ~call.allowed[:, :, -1:].all(-1, keepdim=True)
        output_BHTD = _attend(call)
        return (output_BHTD.double() + 0.1 * padded_B111).to(output_BHTD.dtype)

    _replace(model, attend)


def length_of_captured_graph(model: Any) -> None:
    """ik_llama.cpp#2096: decode goes on with the number of keys that its graph was captured with."""
    captured: list[int] = []

    def attend(call: Call) -> Tensor:
        num_keys = call.key.shape[2]
        if call.is_prefill:
            captured.clear()
        elif not captured or num_keys - captured[0] > 16:
            captured[:] = [num_keys]
        else:
            seen = torch.arange(num_keys, device=call.key.device) < captured[0]
            call = replace(call, allowed=call.allowed & seen)
        return _attend(call)

    _replace(model, attend)


class _KeepsMore:
    """Attends over keys of its own that the window's cache has dropped, in decode."""

    def __init__(self, num_more: int) -> None:
        self.num_more = num_more

    def __call__(self, call: Call) -> Tensor:
        rows, num_new, num_keys = *call.query.shape[::2], call.key.shape[2]
        visible_BS = call.allowed.any(-2).flatten(1).expand(rows, -1)
        new = call.key[:, :, -num_new:], call.value[:, :, -num_new:], visible_BS[:, -num_new:]
        if num_new == num_keys:  # a new text
            self.key, self.value, self.visible = new
        else:
            self.key = torch.cat((self.key, new[0]), 2)
            self.value = torch.cat((self.value, new[1]), 2)
            self.visible = torch.cat((self.visible, new[2]), 1)
        num_dropped = self.key.shape[2] - num_keys
        if call.is_prefill or not num_dropped:
            return _attend(call)
        more = slice(num_dropped - min(self.num_more, num_dropped), num_dropped)
        allowed_B11S = call.allowed.expand(rows, -1, -1, -1)
        return _attend(
            replace(
                call,
                key=torch.cat((self.key[:, :, more], call.key), 2),
                value=torch.cat((self.value[:, :, more], call.value), 2),
                allowed=torch.cat((self.visible[:, None, None, more], allowed_B11S), -1),
            )
        )


def _attend(call: Call, change: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
    scores_BHTS = change(call.query @ call.key.transpose(2, 3))
    wide = torch.promote_types(scores_BHTS.dtype, torch.float32)
    scores_BHTS = scores_BHTS.to(wide) * call.scaling
    if call.softcap:
        scores_BHTS = torch.tanh(scores_BHTS / call.softcap) * call.softcap
    lowest = torch.finfo(torch.bfloat16).min  # finite, in every dtype
    weights_BHTS = scores_BHTS.masked_fill(~call.allowed, lowest).softmax(-1)
    return weights_BHTS.to(call.value.dtype) @ call.value


def _without_window(call: Call) -> Tensor:
    """Every key before the query that any query sees."""
    num_queries, num_keys = call.allowed.shape[-2:]
    causal = call.allowed.new_ones(num_queries, num_keys).tril(num_keys - num_queries)
    return causal & call.allowed.any(-2, keepdim=True)


def _as_if_contiguous(x: Tensor) -> Tensor:
    right = x.contiguous()
    return x.as_strided(right.shape, right.stride(), x.storage_offset())


def _repeat(x: Tensor, num_groups: int) -> Tensor:
    return x.repeat_interleave(num_groups, dim=1)


def _repeat_by_strides(x: Tensor, num_groups: int) -> Tensor:
    """As a kernel for shared heads has it: the tensors it is given are those of the projections."""
    rows, heads, length, size = x.shape
    copied = torch.empty_strided(
        (rows, heads * num_groups, length, size),
        (heads * num_groups * length * size, size, heads * num_groups * size, 1)
        if not x.is_contiguous()
        else (heads * num_groups * length * size, length * size, size, 1),
        dtype=x.dtype,
        device=x.device,
    )
    return copied.copy_(_repeat(x, num_groups))


def _replace(
    model: Any,
    attend: Callable[[Call], Tensor],
    repeat: Callable[[Tensor, int], Tensor] = _repeat,
) -> None:
    """Let layer LAYER attend by `attend`."""
    attention = model.model.layers[LAYER].self_attn
    modeling: Any = sys.modules[type(attention).__module__]
    name = model.config._attn_implementation
    original = ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)

    def planted(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if module is not attention:
            return original(module, query, key, value, mask, **kwargs)
        groups = module.num_key_value_groups
        call = Call(
            query,
            repeat(key, groups),
            repeat(value, groups),
            _allowed(query, key, mask),
            module.scaling,
            getattr(module, "attn_logit_softcapping", None),
        )
        return attend(call).transpose(1, 2).contiguous(), None

    if name in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS[name] = planted
    else:
        modeling.eager_attention_forward = planted


def _allowed(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        return every.tril(num_keys - num_queries)[None, None]
    mask = mask[..., :num_keys]
    return mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
