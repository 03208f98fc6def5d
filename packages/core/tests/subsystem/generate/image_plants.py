"""Faults of models that read images inside texts; the text of plants.py next to the model."""

import functools
from typing import Any

import torch
from torch import nn


def embeddings_one_token_late(model: Any) -> None:
    find = model.model.get_placeholder_mask

    def late(*args: Any, **kwargs: Any) -> Any:
        return find(*args, **kwargs).roll(1, dims=1)

    model.model.get_placeholder_mask = late


def image_of_another_row(model: Any) -> None:
    compute = model.model.get_image_features

    @functools.wraps(compute)
    def rolled(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        result.pooler_output = [*result.pooler_output[1:], result.pooler_output[0]]
        return result

    model.model.get_image_features = rolled


def axes_swapped(model: Any) -> None:
    rotary = model.model.language_model.rotary_emb
    rotary.mrope_section = [rotary.mrope_section[number] for number in (0, 2, 1)]
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids[[0, 2, 1]])


def other_normalization(model: Any) -> None:
    compute = model.model.get_image_features

    @functools.wraps(compute)
    def normalized(pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(0.98 * pixel_values + 0.01, *args, **kwargs)

    model.model.get_image_features = normalized


def patches_by_column(model: Any) -> None:
    patches = model.model.visual.patch_embed
    forward = patches.forward

    def reordered(hidden: Any) -> Any:
        found = forward(hidden)
        return found.reshape(-1, 2, 2, found.shape[-1]).transpose(1, 2).reshape(found.shape)

    patches.forward = reordered


def projector_without_bias(model: Any) -> None:
    linear = model.model.multi_modal_projector.linear_1
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)


def tower_in_bfloat16(model: Any) -> None:
    tower = model.model.vision_tower.to(torch.bfloat16)
    forward = tower.forward

    def narrow(pixel_values: Any, **kwargs: Any) -> Any:
        found = forward(pixel_values.bfloat16(), **kwargs)
        for key, value in found.items():
            if isinstance(value, torch.Tensor):
                found[key] = value.float()
            elif isinstance(value, tuple):
                found[key] = tuple(one.float() for one in value)
        return found

    tower.forward = narrow


def images_attend_to_each_other(model: Any) -> None:
    for block in model.model.visual.blocks:
        forward = block.attn.forward

        def together(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            bounds = kwargs["cu_seqlens"]
            return forward(*args, **{**kwargs, "cu_seqlens": bounds[[0, -1]]})

        block.attn.forward = together


def decode_without_offset(model: Any) -> None:
    forward = model.model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        if kwargs["position_ids"].shape[-1] == 1:
            kwargs["position_ids"] = kwargs["position_ids"] - model.model.rope_deltas
        return forward(*args, **kwargs)

    model.model.forward = changed


def positions_resized_by_cubic(model: Any) -> None:
    model.model.visual.interpolation_mode = "bicubic"


def positions_resized_without_corners(model: Any) -> None:
    model.model.visual.interpolation_align_corners = False


def image_read_causally(model: Any) -> None:
    forward = model.model.forward

    def causal(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, "token_type_ids": None})

    model.model.forward = causal


def padding_patches_read(model: Any) -> None:
    tower = model.model.vision_model
    forward = tower.forward

    def unmasked(*args: Any, patch_attention_mask: Any, **kwargs: Any) -> Any:
        mask = torch.ones_like(patch_attention_mask)
        return forward(*args, patch_attention_mask=mask, **kwargs)

    tower.forward = unmasked


def padding_of_sounds_read(model: Any) -> None:
    tower = model.model.audio_tower
    forward = tower.forward

    def unmasked(features: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(features, attention_mask=None, **kwargs)

    tower.forward = unmasked
