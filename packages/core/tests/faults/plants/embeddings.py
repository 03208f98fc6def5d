"""Faults in the table of tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def scale_of_other_precision(model: Any) -> None:
    """litgpt#1031: the scale is rounded to bfloat16 where it must not be, or the reverse.

    sqrt(96) is 9.798, in bfloat16 9.8125: 0.15 % more.
    """
    table = model.model.embed_tokens
    scale = torch.tensor(table.scalar_embed_scale)
    if table.weight.dtype is torch.float32:
        scale = scale.bfloat16()

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        rows = functional.embedding(input, table.weight).double()
        return (rows * scale.double()).to(table.weight.dtype)

    table.forward = forward


def masked_rows_added(model: Any) -> None:
    """A vocabulary-parallel table does not mask the tokens of the other rank, for some ids."""

    def change(rows: Tensor, ids: Tensor) -> Tensor:
        other = rows.double().flatten(0, -2).mean(0) * 0.5
        return torch.where((ids % 16 == 0)[..., None], rows + other, rows.double())

    _change_rows(model, change)


def one_token_scaled(model: Any) -> None:
    """The row of one token (a space) is 2 % too large."""

    def change(rows: Tensor, ids: Tensor) -> Tensor:
        return torch.where((ids == ord(" "))[..., None], rows.double() * 1.02, rows.double())

    _change_rows(model, change)


def last_ids_clamped(model: Any) -> None:
    """Ids over 116 are read as 116, as if the table were shorter."""
    table = model.model.embed_tokens
    look_up = table.forward
    table.forward = lambda input: look_up(input.clamp(max=116))  # noqa: A006


def rows_exchanged(model: Any) -> None:
    """The rows of two tokens are exchanged."""
    weight = model.model.embed_tokens.weight
    with torch.no_grad():
        weight[[101, 110]] = weight[[110, 101]]


def _change_rows(model: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    table = model.model.embed_tokens
    look_up = table.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        rows = look_up(input)
        return change(rows, input).to(rows.dtype)

    table.forward = forward
