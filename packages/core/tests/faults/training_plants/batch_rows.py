"""Faults that show only where the rows of a micro-batch, or the micro-batches of a step, differ."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from assay.training.protocol import MicroBatch
from assay.training.trainers.parallel import PipelineTrainer

LAYER = 1
_TILE = 8


def first_tile_of_the_first_row(model: Any) -> None:
    """An MLP whose kernel has a wrong stride of its batch: the first tile of all rows is row 0's."""
    mlp = model.model.layers[LAYER].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(_FirstTile.apply(x))  # type: ignore[no-untyped-call]


def keys_of_the_first_row(model: Any) -> None:
    """The same of the keys, as a kernel has it that reads them by the query's head alone."""
    k_proj = model.model.layers[LAYER].self_attn.k_proj
    original = k_proj.forward
    k_proj.forward = lambda x: _FirstTile.apply(original(x))  # type: ignore[no-untyped-call]


def gradients_of_another_row(model: Any) -> None:
    """Row after row, the gradient of an activation is that of the row before."""
    act_fn = model.model.layers[LAYER].mlp.act_fn
    original = act_fn.forward
    act_fn.forward = lambda x: _RowsTurned.apply(original(x))  # type: ignore[no-untyped-call]


def lengths_in_place_of_the_mask(model: Any) -> None:
    """Attention that is given each row's number of tokens, and counts them from the left."""
    attention = model.model.layers[LAYER].self_attn
    original = attention.forward

    def forward(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            allowed = attention_mask == 0 if attention_mask.is_floating_point() else attention_mask
            tokens = allowed[:, :, -1].any(1).sum(-1)
            length = allowed.shape[-1]
            columns = torch.arange(length)
            seen = (columns < tokens[:, None])[:, None, None] & (columns[:, None] >= columns)
            attention_mask = seen
        return original(*args, attention_mask=attention_mask, **kwargs)

    attention.forward = forward


class StageBuiltAnew(PipelineTrainer):
    """A stage is built anew for micro-batches of another length, and loses its gradients so far."""

    def run_schedule(self, batch: Sequence[MicroBatch], num_tokens: int) -> float:
        total = 0.0
        for _, some in groupby(batch, key=lambda one: one["input_ids"].shape):
            self.optimizer.zero_grad(set_to_none=True)
            total += super().run_schedule(list(some), num_tokens)
        return total


class _RowsTurned(torch.autograd.Function):
    """The identity, whose gradients go to the next row."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        del ctx
        return gradient.roll(1, 0)


class _FirstTile(torch.autograd.Function):
    """The values of row 0 for all; backward, a kernel of its own, is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return torch.cat([x[:1, :_TILE].expand(len(x), -1, -1), x[:, _TILE:]], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        del ctx
        return gradient
