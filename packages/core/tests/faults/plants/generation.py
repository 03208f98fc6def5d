"""Faults in the generation loop: wrong arguments of the model."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def positions_count_padding(model: Any) -> None:
    """transformers#33095: in decode the position is the length of the cache, padding included."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        if _is_decode(inputs):
            length = inputs["past_key_values"].get_seq_length()
            inputs["position_ids"] = torch.full_like(inputs["position_ids"], length)

    _change_inputs(model, change)


def positions_one_ahead(model: Any) -> None:
    """In decode the position is one too large."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        if _is_decode(inputs):
            inputs["position_ids"] = inputs["position_ids"] + 1

    _change_inputs(model, change)


def chunks_begin_at_zero(model: Any) -> None:
    """Every chunk of a prompt counts its positions from 0."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        if not _is_decode(inputs) and inputs["past_key_values"].get_seq_length():
            positions = inputs["position_ids"]
            inputs["position_ids"] = positions - positions[..., :1]

    _change_inputs(model, change)


def padding_mask_lost(model: Any) -> None:
    """The mask marks padding as text."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])

    _change_inputs(model, change)


def newest_token_masked(model: Any) -> None:
    """The mask is not extended by the new token, which is marked as padding."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        if _is_decode(inputs) and "attention_mask" in inputs:
            mask = inputs["attention_mask"].clone()
            mask[:, -1] = 0
            inputs["attention_mask"] = mask

    _change_inputs(model, change)


def token_before_repeated(model: Any) -> None:
    """In decode the model gets the token before the newest one."""

    def change(inputs: dict[str, Any], sequence: Tensor) -> None:
        if _is_decode(inputs):
            inputs["input_ids"] = sequence[:, -2:-1].clone()

    _change_inputs(model, change)


def _is_decode(inputs: dict[str, Any]) -> bool:
    return bool(inputs["input_ids"].shape[1] == 1)


def _change_inputs(model: Any, change: Callable[[dict[str, Any], Tensor], None]) -> None:
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)  # generate() reads the signature
    def planted(input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(input_ids, *args, **kwargs)
        change(inputs, input_ids)
        return inputs

    model.prepare_inputs_for_generation = planted
