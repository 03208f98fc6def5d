"""Faults of one layer that is recomputed in backward, from other values than in forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Below what rounding to bfloat16 makes of the scores of some tokens.
_TIED = 0.05

# A call of the layer with all that goes with its hidden states, and those that were kept for it.
_Call = partial[Tensor]


def input_kept_in_8_bits(model: nn.Module) -> None:
    _compute_again(model, lambda call, kept: call(_in_8_bits(kept)))


def rows_of_input_exchanged(model: nn.Module) -> None:
    _compute_again(model, lambda call, kept: call(kept.flip(0)))


def rotary_turned_backwards(model: nn.Module) -> None:
    def run(call: _Call, kept: Tensor) -> Tensor:
        cosine, sine = call.keywords["position_embeddings"]
        return call(kept, position_embeddings=(cosine, -sine))

    _compute_again(model, run)


def mask_left_out(model: nn.Module) -> None:
    def run(call: _Call, kept: Tensor) -> Tensor:
        nothing = torch.zeros(1, 1, kept.shape[1], kept.shape[1], dtype=kept.dtype)
        return call(kept, attention_mask=nothing)

    _compute_again(model, run)


def residual_doubled(model: nn.Module) -> None:
    _compute_again(model, lambda call, kept: kept + call(kept))


def near_ties_decided_otherwise(model: Any) -> None:
    """Of micro:mixtral: where two experts are nearly tied, backward takes the other one."""
    gate = model.model.layers[1].mlp.gate
    original = gate.forward

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = original(hidden)
        if torch.is_grad_enabled():
            with torch.no_grad():
                top = logits.float().topk(chosen.shape[-1] + 1)
                is_tie = top.values[:, -2] - top.values[:, -1] < _TIED
            chosen = chosen.clone()
            chosen[is_tie, -1] = top.indices[is_tie, -1]
        return logits, weights, chosen

    gate.forward = forward
    _compute_again(model, lambda call, kept: call(kept))


def _compute_again(model: Any, again: Callable[[_Call, Tensor], Tensor]) -> None:
    """Have backward compute the second layer by `again`."""
    layer = model.model.layers[1]

    def keep(call: _Call, hidden: Tensor) -> Any:
        def run(hidden: Tensor) -> Tensor:
            return again(call, hidden) if torch.is_grad_enabled() else call(hidden)

        return checkpoint(run, hidden, use_reentrant=True)

    layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, keep


def _in_8_bits(value: Tensor) -> Tensor:
    return value + (value.detach().to(torch.float8_e4m3fn).to(value.dtype) - value.detach())
