"""Faults in rotary position embeddings.

Tables of cosines and sines are made by `model.rotary_emb`; queries and keys are rotated with them
by each attention. Sources of single faults are in docs/detection.md.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYER = 1


def phase_in_bfloat16(model: Any) -> None:
    """transformers#29285: position times frequency, rounded to bfloat16."""
    rotary = model.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phase = position_ids.bfloat16()[..., None] * rotary.inv_freq.bfloat16()
        phases = torch.cat((phase, phase), dim=-1).float()
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)

    rotary.forward = forward


def other_theta(model: Any) -> None:
    """The base of another model: 5e5 instead of 1e4."""
    frequencies = model.model.rotary_emb.inv_freq
    exponents = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
    _replace_frequencies(model, 5e5**-exponents)


def scaling_factor_applied(model: Any) -> None:
    """Linear scaling by 4, of a model that has none."""
    _replace_frequencies(model, model.model.rotary_emb.inv_freq / 4)


def attention_factor(model: Any) -> None:
    """Cosines and sines times 1.01, the attention factor of another scaling."""
    model.model.rotary_emb.attention_scaling *= 1.01


def one_frequency_wrong(model: Any) -> None:
    """The slowest frequency is 2 % too high."""
    frequencies = model.model.rotary_emb.inv_freq.clone()
    frequencies[-1] *= 1.02
    _replace_frequencies(model, frequencies)


def stale_in_decode(model: Any) -> None:
    """Decode steps get the table of the position before theirs."""
    rotary = model.model.rotary_emb
    make_tables = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        behind = 1 if position_ids.shape[-1] == 1 else 0
        tables: tuple[Tensor, Tensor] = make_tables(x, position_ids - behind)
        return tables

    rotary.forward = forward


def positions_end_at_1000(model: Any) -> None:
    """Tables are made for 1,000 positions; later ones get the last."""
    rotary = model.model.rotary_emb
    make_tables = rotary.forward
    rotary.forward = lambda x, position_ids: make_tables(x, position_ids.clamp(max=999))


def interleaved(model: Any) -> None:
    """Pairs of neighbours are rotated instead of halves, in every layer: a wrong conversion."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + _rotate_neighbours(x) * sin for x in (q, k))

    sys.modules[type(model.model).__module__].apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]


def keys_not_rotated(model: Any) -> None:
    """One layer rotates queries only."""

    def rotate(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return original(q, k, cos, sin)[0], k

    _in_one_layer(model, rotate)


def sine_of_other_sign(model: Any) -> None:
    """One layer rotates backwards."""

    def rotate(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return original(q, k, cos, -sin)

    _in_one_layer(model, rotate)


def last_dims_not_rotated(model: Any) -> None:
    """One layer rotates three quarters of each head, as models with partial rotation do."""

    def rotate(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        start = q.shape[-1] * 3 // 4
        rotated = original(q, k, cos, sin)
        return tuple(
            torch.cat((new[..., :start], old[..., start:]), -1)
            for new, old in zip(rotated, (q, k), strict=True)
        )

    _in_one_layer(model, rotate)


def _replace_frequencies(model: Any, frequencies: Tensor) -> None:
    buffer = model.model.rotary_emb.inv_freq
    assert not torch.equal(buffer, frequencies)
    buffer.copy_(frequencies)


def _rotate_neighbours(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def _in_one_layer(model: Any, rotate: Callable[..., Any]) -> None:
    """Let layer LAYER rotate by `rotate`, which gets the right function first."""
    attention = model.model.layers[LAYER].self_attn
    modeling: Any = sys.modules[type(attention).__module__]
    original, attend = modeling.apply_rotary_pos_emb, attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        modeling.apply_rotary_pos_emb = lambda q, k, cos, sin: rotate(original, q, k, cos, sin)
        try:
            return attend(*args, **kwargs)
        finally:
            modeling.apply_rotary_pos_emb = original

    attention.forward = forward
