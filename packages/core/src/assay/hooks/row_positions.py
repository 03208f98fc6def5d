"""The prompt and position of each row of a tensor."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from assay.sites import RowMap


@dataclass(frozen=True, slots=True)
class BatchPositions:
    """Positions of all tokens of a batch, of prompts and of generated ones."""

    prompts: tuple[int, ...]
    """Prompt number of each batch row, (B,)."""
    positions: Tensor
    """(B, columns), -1 for padding."""

    @classmethod
    def of_batch(
        cls, prompts: tuple[int, ...], attention_mask_BT: Tensor, num_new_tokens: int
    ) -> Self:
        """Return the positions of a left-padded batch that generates `num_new_tokens`."""
        new = torch.ones(len(prompts), num_new_tokens, dtype=attention_mask_BT.dtype)
        mask = torch.cat([attention_mask_BT, new], dim=1)
        return cls(prompts, (mask.cumsum(1) - 1).masked_fill(mask == 0, -1))

    @classmethod
    def of_call(
        cls,
        tokens: Tensor,
        attention_mask: object,
        position_ids: object = None,
        cache: object = None,
    ) -> Self:
        """Derive the positions from the arguments of one forward call.

        tokens: (B, T) ids or (B, T, C) embeddings.
        attention_mask: (B, past + T); anything else means no padding.
        position_ids: (B, T) or (1, T), used without a mask; anything else means to count from
            the length of `cache`.
        """
        batch, length = tokens.shape[:2]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            mask = attention_mask.detach().cpu()
            if mask.shape[0] == batch and mask.shape[1] >= length:
                return cls.of_batch(tuple(range(batch)), mask.long(), 0)
        past = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        start = past if isinstance(past, int) else 0  # reading a tensor would wait for the device
        positions = torch.arange(start, start + length).expand(batch, length)
        if isinstance(position_ids, Tensor) and position_ids.shape in (
            (1, length),
            (batch, length),
        ):
            positions = position_ids.detach().cpu().long().expand(batch, length)
        return cls(tuple(range(batch)), positions)

    def rows(self, start: int, length: int) -> RowMap:
        """Return the row map of a forward call over the columns from `start`."""
        part = self.positions[:, start : start + length]
        return RowMap(self.prompts, tuple(tuple(row) for row in part.tolist()))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The dims of a tensor that stand for batch rows and tokens."""

    batch_dim: int | None
    token_dim: int | None
    flattened: bool = False
    """True if dim 0 is B * T."""
    tail: bool = False
    """True if the token dim holds only the last tokens of the call."""

    @classmethod
    def of_shape(cls, shape: torch.Size | tuple[int, ...], rows: RowMap | None) -> "RowLayout":
        """Return the layout of a tensor of this shape in a call over `rows`.

        In Hugging Face modules the batch is dim 0, tokens are dim 1, or dim 2 after the heads.
        """
        unknown = cls(None, None)
        if rows is None or len(shape) < 2:
            return unknown
        num_rows, length = rows.num_rows, rows.length
        token_dims = (2, 1) if len(shape) == 4 else (1,)
        if shape[0] in (num_rows, 1):
            batch_dim = 0 if shape[0] == num_rows else None
            for dim in token_dims:
                if dim < len(shape) and shape[dim] == length:
                    return cls(batch_dim, dim)
            if len(shape) >= 3 and shape[token_dims[0]] < length:
                return cls(batch_dim, token_dims[0], tail=True)
            return cls(batch_dim, None)
        if shape[0] == num_rows * length:
            return cls(0, None, flattened=True)
        return unknown


class RowIndex:
    """Addresses of the rows of all tensors of one root call, cached by shape."""

    def __init__(self, rows: RowMap | None) -> None:
        self.rows = rows
        self._known: dict[tuple[int, ...], _Addresses] = {}

    def flatten(self, *tensors: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return tensors of one shape as (R, C) without padding, with prompt and position of each row.

        Rows of an unknown prompt are all kept, with prompt and position -1.
        """
        known = self._addresses(tensors[0].shape)
        flat = [_as_rows(tensor) for tensor in tensors]
        if known.kept is not None:
            flat = [tensor.index_select(0, known.kept) for tensor in flat]
        return flat, known.prompt, known.position

    def has_padding(self, tensor: Tensor) -> bool:
        """Return True if `flatten` leaves out rows of this tensor."""
        return self._addresses(tensor.shape).kept is not None

    def padding(self, *tensors: Tensor) -> list[Tensor]:
        """Return the rows of tensors of one shape that `flatten` leaves out, as (P, C)."""
        left_out = self._addresses(tensors[0].shape).left_out
        return [_as_rows(tensor).index_select(0, left_out) for tensor in tensors]

    def _addresses(self, shape: torch.Size) -> "_Addresses":
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = _Addresses.of_shape(shape, self.rows)
        return known


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Prompt and position of each row that is kept."""

    prompt: Tensor
    position: Tensor
    kept: Tensor | None
    """Numbers of the rows without padding, None for all."""
    left_out: Tensor
    """Numbers of the rows of padding."""

    @classmethod
    def of_shape(cls, shape: torch.Size, rows: RowMap | None) -> Self:
        """Return the addresses of a tensor of this shape in a call over `rows`."""
        layout = RowLayout.of_shape(shape, rows)
        prompt, position = _row_addresses(shape[:-1], layout, rows)
        valid = position >= 0
        if layout.token_dim is None and not layout.flattened:
            valid = torch.ones_like(valid)
        left_out = (~valid).nonzero()[:, 0]
        if not len(left_out):
            return cls(prompt, position, None, left_out)
        kept = valid.nonzero()[:, 0]
        return cls(prompt[kept], position[kept], kept, left_out)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as (R, C): the last dim has the channels."""
    width = tensor.shape[-1] if tensor.ndim else 1
    return tensor.reshape(math.prod(tensor.shape[:-1]), width)


def _row_addresses(
    leading: tuple[int, ...], layout: RowLayout, rows: RowMap | None
) -> tuple[Tensor, Tensor]:
    unknown = torch.full(leading or (1,), -1, dtype=torch.long)
    if rows is None or (layout.batch_dim is None and layout.token_dim is None):
        return unknown.reshape(-1), unknown.reshape(-1)
    prompts_B = torch.tensor(rows.prompts)
    positions_BT = torch.tensor(rows.positions)
    if layout.flattened:
        prompts_BT = prompts_B[:, None].expand_as(positions_BT)
        shape = [leading[0]] + [1] * (len(leading) - 1)
        prompt, position = (of.reshape(shape).expand(leading) for of in (prompts_BT, positions_BT))
        return prompt.reshape(-1), position.reshape(-1)
    if layout.tail and layout.token_dim is not None:
        positions_BT = positions_BT[:, rows.length - leading[layout.token_dim] :]
    if layout.batch_dim is None:
        # One row for all prompts: valid if any prompt has a token there.
        positions_BT = positions_BT.amax(0, keepdim=True)
        prompts_B = torch.full((1,), -1)
    shape = [1] * len(leading)
    shape[0] = prompts_B.shape[0]
    prompt = prompts_B.reshape(shape).expand(leading)
    if layout.token_dim is None or layout.token_dim >= len(leading):
        # One row per prompt: it has the position of the token if there is only one.
        positions_BT = positions_BT if rows.length == 1 else positions_BT[:, :1] * 0
        position = positions_BT.reshape(shape).expand(leading)
        return prompt.reshape(-1), position.reshape(-1)
    shape[layout.token_dim] = positions_BT.shape[1]
    position = positions_BT.reshape(shape).expand(leading)
    return prompt.reshape(-1), position.reshape(-1)
