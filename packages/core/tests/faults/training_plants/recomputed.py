"""Faults of one layer that is recomputed in backward, from other values than in forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
