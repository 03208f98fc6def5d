"""Faults in what an attention computes between its projections."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LAYER = 1


def scale_2_percent(model: Any) -> None:
    """The scale of the scores is 2 % too large."""
    _attention(model).scaling *= 1.02


def scale_half_percent(model: Any) -> None:
    """The scale of the scores is 0.5 % too large."""
    _attention(model).scaling *= 1.005


def softcap_lost(model: Any) -> None:
    """Scores are not capped."""
    attention = _attention(model)
    assert attention.attn_logit_softcapping
    attention.attn_logit_softcapping = None


def softcap_halved(model: Any) -> None:
    """Scores are capped at half of the limit."""
    _attention(model).attn_logit_softcapping /= 2


def heads_in_wrong_groups(model: Any) -> None:
    """Key and value heads are repeated as a row instead of each by itself."""

    def attend(original: Any, query_BHTD: Tensor, *rest: Any) -> Any:
        num_groups = _attention(model).num_key_value_groups
        heads = torch.arange(query_BHTD.shape[1]).view(-1, num_groups).T.flatten()
        output_BTHD, weights = original(query_BHTD[:, heads], *rest)
        return output_BTHD[:, :, heads.argsort()], weights

    _replace(model, attend)


def heads_exchanged(model: Any) -> None:
    """The results of the first two heads are exchanged."""

    def change(output_BTHD: Tensor) -> Tensor:
        order = [1, 0, *range(2, output_BTHD.shape[2])]
        return output_BTHD[:, :, order]

    _change_output(model, change)


def one_head_scaled(model: Any) -> None:
    """The results of one head are 1 % too large."""

    def change(output_BTHD: Tensor) -> Tensor:
        factors = torch.ones(output_BTHD.shape[2], 1, device=output_BTHD.device)
        factors[1] = 1.01
        return (output_BTHD.double() * factors).to(output_BTHD.dtype)

    _change_output(model, change)


def softmax_in_bfloat16(model: Any) -> None:
    """Scores and probabilities are rounded to bfloat16."""

    def attend(original: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        del original
        return _attend_slowly(model, q, k, v, mask, lambda scores: scores.bfloat16().softmax(-1))

    _replace(model, attend)


def padding_not_a_number(model: Any) -> None:
    """Queries that may see nothing get 0/0, which the next layer's values spread to all rows."""

    def normalise(scores: Tensor) -> Tensor:
        excluded = scores <= torch.finfo(torch.bfloat16).min
        return scores.masked_fill(excluded, -torch.inf).softmax(-1)

    def attend(original: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        del original
        return _attend_slowly(model, q, k, v, mask, normalise)

    _replace(model, attend)


def softmax_with_extra_one(model: Any) -> None:
    """The sum under the softmax is 1 too large: an attention sink that the model does not have."""

    def normalise(scores: Tensor) -> Tensor:
        sink = torch.zeros_like(scores[..., :1])
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]

    def attend(original: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        del original
        return _attend_slowly(model, q, k, v, mask, normalise)

    _replace(model, attend)


def values_one_behind(model: Any) -> None:
    """Values are those of the token before."""

    def attend(original: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        return original(q, k, v.roll(1, dims=2), mask)

    _replace(model, attend)


def dropout_in_eval(model: Any) -> None:
    """transformers#33844: probabilities are dropped out although nothing is trained."""
    attention = _attention(model)
    attention.training = True
    attention.attention_dropout = 0.1


def _attention(model: Any) -> Any:
    return model.model.layers[LAYER].self_attn


def _attend_slowly(
    model: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    normalise: Callable[[Tensor], Tensor],
) -> tuple[Tensor, None]:
    attention = _attention(model)
    key, value = (x.repeat_interleave(attention.num_key_value_groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * attention.scaling
    softcap = getattr(attention, "attn_logit_softcapping", None)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        length, num_keys = scores.shape[-2:]
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(num_keys - length)
    allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    scores = scores.masked_fill(~allowed, torch.finfo(torch.bfloat16).min)  # finite in both
    weights = normalise(scores).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _change_output(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    def attend(original: Any, *inputs: Any) -> Any:
        output_BTHD, weights = original(*inputs)
        return change(output_BTHD), weights

    _replace(model, attend)


def _replace(model: Any, attend: Callable[..., Any]) -> None:
    """Let layer LAYER attend by `attend`, which gets the right function first."""
    attention = _attention(model)
    modeling: Any = sys.modules[type(attention).__module__]
    name = model.config._attn_implementation
    original = ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)

    def planted(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if module is not attention:
            return original(module, query, key, value, mask, **kwargs)

        def as_it_was(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
            return original(module, q, k, v, mask, **kwargs)

        return attend(as_it_was, query, key, value, mask)

    if name in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS[name] = planted
    else:
        modeling.eager_attention_forward = planted
