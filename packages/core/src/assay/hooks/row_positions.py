"""The prompt and position of each row of a tensor."""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from assay.hooks.caches import cache_of, count_tokens
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
        attention_mask: (B, S) of these tokens, of those in the cache, and of empty slots of a static cache;
            anything else means no padding.
        position_ids: (B, T) or (1, T), used without a mask; anything else means to count from
            the length of `cache`.
        Returns: the positions of the T tokens.
        """
        batch, length = tokens.shape[:2]
        past = count_tokens(cache)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            mask = (attention_mask.detach() != 0).cpu().long()
            start = find_columns(mask, length, past) if len(mask) == batch else None
            if start is not None:
                prompts = tuple(range(batch))
                found = cls.of_batch(prompts, mask[:, : start + length], 0).positions[:, start:]
                # A mask of the call's tokens alone does not count earlier ones.
                return cls(prompts, found.where(found < 0, found + (past or start) - start))
        start = past or 0
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


def find_columns(mask_BS: Tensor, length: int, past: int | None) -> int | None:
    """Return the column of a padding mask where the tokens of a call begin.

    past: number of earlier tokens; None if unknown.
    Returns: None for the mask of another sequence, such as that of an encoder in a call of its decoder.
    """
    num_columns = mask_BS.shape[1]
    if num_columns == length:
        return 0
    start = num_columns - length if past is None else past
    if start < 0 or start + length > num_columns:
        return None
    # Slots that a static cache has not filled are masked. Without a known length, no token may be.
    is_own = (
        not mask_BS[:, start + length :].any() if past is not None else mask_BS[:, start:].all()
    )
    return start if bool(is_own) else None


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of a call, and the arguments that go with them."""

    values: Tensor
    """(B, T) ids or (B, T, C) embeddings."""
    prefix: str
    """`decoder_` for the tokens of a decoder in a call that may get those of its encoder too."""
    arguments: dict[str, Any]

    @property
    def mask(self) -> object:
        """Return the argument with the mask of these tokens."""
        return self.arguments.get(f"{self.prefix}attention_mask")

    def derive_rows(self) -> RowMap:
        """Return the prompt and position of each token."""
        others = (
            self.arguments.get(f"{self.prefix}position_ids"),
            cache_of(self.arguments),
        )
        return BatchPositions.of_call(self.values, self.mask, *others).rows(0, self.values.shape[1])

    def are_of(self, known: "CallTokens", rows: RowMap | None) -> bool:
        """Return True for the caller's tokens, which have `rows`, or for their embeddings."""
        if self.values is known.values:
            return True
        is_of_pairs = isinstance(self.mask, Tensor) and self.mask.ndim != 2
        return (
            rows is not None
            and not (self.prefix or known.prefix)
            and (rows.num_rows, rows.length) == self.values.shape[:2]
            and (self.mask is known.mask or self.mask is None or is_of_pairs)
            and self.arguments.get("encoder_hidden_states") is None
        )


def find_tokens(arguments: dict[str, Any]) -> CallTokens | None:
    """Return the tokens that a call computes: those of the decoder, where it gets both."""
    for prefix in ("decoder_", ""):
        for name in (f"{prefix}input_ids", f"{prefix}inputs_embeds"):
            values = arguments.get(name)
            if isinstance(values, Tensor) and values.ndim >= 2:
                return CallTokens(values, prefix, arguments)
    return None


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


def holds_rows(shape: torch.Size, rows: RowMap | None) -> bool:
    """Return True if a tensor has rows of a call over `rows`. An image has as many dims as a cache."""
    layout = RowLayout.of_shape(shape, rows)
    if len(shape) > 3:
        return layout.token_dim is not None and not layout.tail
    return layout.batch_dim is not None or layout.token_dim is not None


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

    def num_padding(self, tensor: Tensor) -> int:
        """Return the number of rows of this tensor that `flatten` leaves out."""
        return self._addresses(tensor.shape).num_padding

    def kept(self, shape: torch.Size) -> Tensor:
        """Return which rows of a tensor `flatten` keeps, bool of its shape without the last dim."""
        kept = torch.ones(math.prod(shape[:-1]), dtype=torch.bool)
        kept[self._addresses(shape).left_out] = False
        return kept.reshape(shape[:-1])

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
    num_padding: int

    @classmethod
    def of_shape(cls, shape: torch.Size, rows: RowMap | None) -> Self:
        """Return the addresses of a tensor of this shape in a call over `rows`."""
        layout = RowLayout.of_shape(shape, rows)
        prompt, position = _row_addresses(shape[:-1], layout, rows)
        valid = position >= 0
        is_other = layout.tail and len(shape) == 3  # it may be another sequence, such as patches
        if is_other or (layout.token_dim is None and not layout.flattened):
            valid = torch.ones_like(valid)
        left_out = (~valid).nonzero()[:, 0]
        if not len(left_out):
            return cls(prompt, position, None, left_out, 0)
        kept = valid.nonzero()[:, 0]
        return cls(prompt[kept], position[kept], kept, left_out, len(left_out))


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
        # An encoder of sounds has rows without tokens.
        position = positions_BT if rows.length == 1 else torch.zeros_like(prompts_B)
        position = position.reshape(shape).expand(leading)
        return prompt.reshape(-1), position.reshape(-1)
    shape[layout.token_dim] = positions_BT.shape[1]
    position = positions_BT.reshape(shape).expand(leading)
    return prompt.reshape(-1), position.reshape(-1)
