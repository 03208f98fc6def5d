"""Faults around the model: in what a generation calls it with, each beside the same code without it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def decode_positions_shared(model: Any) -> None:
    """unsloth#3699: all rows of a padded batch continue at the position of the cache."""
    _set_decode_positions(model, lambda mask: torch.full_like(mask[:, :1], mask.shape[1] - 1))


def decode_positions(model: Any) -> None:
    """No fault."""
    _set_decode_positions(model, lambda mask: mask.sum(1, keepdim=True) - 1)


def begins_twice(model: Any) -> None:
    """vllm#27486, sglang#888: a rendered chat is tokenised with another begin-of-text token."""
    _begin(model, num_added=1)


def begins_once(model: Any) -> None:
    """No fault."""
    _begin(model, num_added=0)


def _begin(model: Any, num_added: int) -> None:
    """Let the first call of a text have `num_added` tokens more, in place of its last ones."""

    def change(inputs: dict[str, Any], _: Tensor) -> None:
        ids, cache = inputs["input_ids"], inputs.get("past_key_values")
        if num_added and (cache is None or not cache.get_seq_length()):
            begin = torch.full_like(ids[:, :num_added], model.config.bos_token_id)
            inputs["input_ids"] = torch.cat((begin, ids), 1)[:, : ids.shape[1]]

    _change_inputs(model, change)


def _set_decode_positions(model: Any, positions: Callable[[Tensor], Tensor]) -> None:
    def change(inputs: dict[str, Any], _: Tensor) -> None:
        mask = inputs.get("attention_mask")
        if inputs["input_ids"].shape[1] == 1 and mask is not None:
            inputs["position_ids"] = positions(mask.long())

    _change_inputs(model, change)


def _change_inputs(model: Any, change: Callable[[dict[str, Any], Tensor], None]) -> None:
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)  # generate() reads the signature
    def planted(input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(input_ids, *args, **kwargs)
        change(inputs, input_ids)
        return inputs

    model.prepare_inputs_for_generation = planted
