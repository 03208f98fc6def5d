"""List the shapes in which a model may take an image, a video, a sound or a time series, the likeliest first."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from assay.inputs import (
    Media,
    document_arguments,
    likely_tensors,
)
from assay.models import LoadedModel
from assay.models.config_files import Settings

# Samples of a sound: a quarter of a second at 16 kHz. Frames of a spectrogram: nearly a second, a multiple of the
# usual factors of subsampling.
_NUM_SAMPLES, _NUM_FRAMES = 4000, 96


def likely_values(
    loaded: LoadedModel, name: str, documented: Mapping[str, tuple[str, str]]
) -> Iterator[Media]:
    """Yield tensors of one row for a documented argument of the model, the likeliest first."""
    for shape in _likely_shapes(name, loaded.model):
        yield Media(name, (1, *shape))
    read = Settings(loaded.model.config).read
    yield from likely_tensors(name, documented, read, of_tokens=loaded.reads_tokens)


def likely_media(loaded: LoadedModel) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors of one row of the model's argument for images or sounds."""
    name, model = loaded.media_input, loaded.model
    arguments = inspect.signature(model.forward).parameters
    read = Settings(model.config).read
    for sizes in _packed_images(name, read, arguments):
        yield sizes[0]
    for shape in _likely_shapes(name, model):
        media = Media(name, (1, *shape))
        if _PATCH_MASK in arguments:
            yield media, _mask_patches(model, shape)
        yield (media,)
    for sizes in likely_images(read, arguments):
        yield sizes[0]
    documented = document_arguments(model.forward)
    if name in documented:
        for one in likely_values(loaded, name, documented):
            yield (one,)


_PATCH_MASK = "bool_masked_pos"


def _mask_patches(model: nn.Module, shape: Sequence[int]) -> Media:
    """Return a mask, (1, patches) bool, of every third patch of an image or video, (..., H, W)."""
    read = Settings(model.config).read
    patch = read("patch_size") or 16
    sides = patch if isinstance(patch, list | tuple) else (patch, patch)
    num_patches = math.prod(size // side for size, side in zip(shape[-2:], sides, strict=True))
    if len(shape) > 3:
        num_patches *= shape[0] // (read("tubelet_size") or 1)
    return Media.of_tensor(_PATCH_MASK, torch.arange(num_patches)[None] % 3 == 0)


def _likely_shapes(name: str, model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of one row of the argument `name`, without its batch."""
    read = Settings(model.config).read
    if "pixel_values" in name:
        image = read("num_channels") or 3, *_image_size(read)
        num_frames = read("num_frames", "frames_per_clip")
        if num_frames is not None:
            yield num_frames, *image
        yield image
        yield image[0], 224, 224  # detectors choose their objects from many places
        yield 2, *image  # matched with each other
    elif name == "input_values":
        if read("num_mel_bins") is not None:
            yield read("max_length") or _NUM_FRAMES, read("num_mel_bins")
        yield (_NUM_SAMPLES,)
        yield (4 * _NUM_SAMPLES,)  # some pool over many frames
        yield read("audio_channels") or 1, _NUM_SAMPLES
    elif name in ("input_features", "audio_features", "features"):
        keys = (
            "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "input_size",
        )  # fmt: skip
        positions = read("max_source_positions")
        for width in filter(None, map(read, keys)):
            if positions is not None:
                yield width, 2 * positions
            yield _NUM_FRAMES, width
    elif name == "past_values":
        length = (read("context_length") or _NUM_FRAMES) + max(read("lags_sequence") or [0])
        num_channels, size = read("num_input_channels"), read("input_size") or 1
        yield length, *((num_channels or size,) if num_channels or size > 1 else ())


# Height and width of images for models without a size of their own.
_SIZE = 64


def _image_size(read: Callable[..., Any]) -> tuple[int, int]:
    """Return height and width of an image."""
    size = read("image_size", "input_size", "img_size") or _SIZE
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


SOUND = "input_features"


def _packed_images(
    name: str, read: Callable[..., Any], arguments: Mapping[str, object]
) -> Iterator[list[tuple[Media, ...]]]:
    """Yield the tensors of one image as patches, for several sizes; nothing for a model that takes whole images."""
    channels = read("num_channels", "in_channels", "in_chans") or 3
    patch, merge = _patch_size(read), _merge_size(read)
    grid = next((one for one in arguments if _GRID.fullmatch(one)), None)
    if grid is not None:
        depth = read("temporal_patch_size", "patch_temporal") or 1
        # Unequal axes: positions along height and width cannot be swapped.
        sizes = [(2 * merge, 3 * merge), (4 * merge, merge)]
        merges = [
            Media(one, (1,), numbers=(merge,)) for one in arguments if one.endswith("merge_sizes")
        ]
        side = patch * merge
        flat = channels * depth * patch**2
        for of_image, of_patch, unit in (
            ((), (flat,), 1),
            ((), (channels, patch, patch), 1),
            ((), (side, side, channels), merge),
            ((1,), (flat,), 1),  # an image with fewer patches is padded
        ):
            yield [
                (
                    Media(name, (*of_image, high * wide // unit**2, *of_patch)),
                    _numbers(
                        grid,
                        [1, high // unit, wide // unit][-3 if grid.endswith("thw") else -2 :],
                    ),
                    *merges,
                )
                for high, wide in sizes
            ]
    elif "target_sizes" in arguments:
        sizes = [(8, 12), (16, 8)]  # a tower that merges twice needs multiples of four
        yield [
            (
                Media(name, (1, channels, patch, high * wide * patch), layout="strip"),
                _numbers("target_sizes", (high, wide)),
            )
            for high, wide in sizes
        ]
    elif "spatial_shapes" in arguments:
        unit = read("downsample_factor") or 2
        yield [
            (
                Media(name, (1, high * wide, channels * patch**2)),
                _numbers("spatial_shapes", (high, wide)),
                Media("pixel_attention_mask", (1, high * wide), numbers=(1,)),
            )
            for high, wide in ((2 * unit, 3 * unit), (4 * unit, unit))
        ]
    elif "pixel_position_ids" in arguments:
        unit = read("pooling_kernel_size") or 1
        high, wide = 2 * unit, 3 * unit
        places = [place for number in range(high * wide) for place in divmod(number, wide)[::-1]]
        yield [
            (
                Media(name, (1, high * wide, channels * patch**2)),
                Media("pixel_position_ids", (1, high * wide, 2), numbers=tuple(places)),
            )
        ]


def _patch_size(read: Callable[..., Any]) -> int:
    patch = read("patch_size") or 14
    return patch if isinstance(patch, int) else int(patch[-1])


def _merge_size(read: Callable[..., Any]) -> int:
    merge = read("spatial_merge_size", "merge_size", "merge_kernel_size") or 2
    return merge if isinstance(merge, int) else int(merge[-1])


_GRID = re.compile(r"(image_)?grid_(thw|hws?)")


def likely_images(
    read: Callable[..., Any], arguments: Mapping[str, object]
) -> Iterator[list[tuple[Media, ...]]]:
    """Yield the tensors of one image, for several sizes, in each form that a model may take."""
    if "pixel_values" not in arguments:
        yield from _likely_sounds(read, arguments) if SOUND in arguments else ()
        return
    packed = [*_packed_images("pixel_values", read, arguments)]
    if packed:
        yield from packed
        return
    channels = read("num_channels", "in_channels", "in_chans") or 3
    height, width = _image_size(read)
    plain = Media("pixel_values", (1, channels, height, width))
    if "image_sizes" in arguments and (grids := read("image_grid_pinpoints")):
        yield [
            (
                replace(
                    plain,
                    shape=(
                        1,
                        1 + math.ceil(high / height) * math.ceil(wide / width),
                        *plain.shape[1:],
                    ),
                ),
                # Not quite as wide: a part of the image is padding.
                _numbers("image_sizes", (high, wide - width // 4)),
            )
            for high, wide in sorted(grids, key=math.prod)[:2]
        ]
    yield [(plain,)]
    if "image_sizes" in arguments:
        unit = _patch_size(read) * _merge_size(read)
        sizes = [(2 * unit, 3 * unit), (4 * unit, unit)]
        yield [
            (replace(plain, shape=(1, channels, *size)), _numbers("image_sizes", size))
            for size in sizes
        ]
    of_row = replace(plain, layout="row")
    if "pixel_attention_mask" in arguments:
        mask = Media("pixel_attention_mask", (1, height, width), numbers=(1,), layout="row")
        parts = [(height, width), (height, width // 2)]
        yield [
            (replace(of_row, extent=(1, channels, *part)), replace(mask, extent=(1, *part)))
            for part in parts
        ]
    if "aspect_ratio_ids" in arguments:
        # Ratios 1 and 2 are one tile, and two on top of each other.
        most = read("max_num_tiles") or 4
        yield [
            (
                replace(
                    of_row,
                    shape=(1, most, *plain.shape[1:]),
                    extent=(1, num_tiles, *plain.shape[1:]),
                ),
                Media("aspect_ratio_ids", (1,), numbers=(num_tiles,), layout="row"),
                Media(
                    "aspect_ratio_mask",
                    (1, most),
                    numbers=(1,),
                    extent=(1, num_tiles),
                    layout="row",
                ),
            )
            for num_tiles in (1, 2)
        ]
    yield [(of_row,)]


def _likely_sounds(
    read: Callable[..., Any], arguments: Mapping[str, object]
) -> Iterator[list[tuple[Media, ...]]]:
    """Yield the spectrogram of one sound with its mask, whole and with padding, in each form that a model may take."""
    width = read("num_mel_bins", "input_dim") or 80
    positions = read("max_source_positions")
    length = 2 * positions if positions else _NUM_FRAMES
    masks = [
        name for name in arguments if name.endswith(("feature_attention_mask", "features_mask"))
    ]
    # The mask of some has the length of the features, and is made without one.
    for is_wide, names in product((True, False), (masks, []) if masks else ([],)):
        sounds = []
        for part in (length, 2 * length // 3):
            shapes = [(1, width, one) if is_wide else (1, one, width) for one in (length, part)]
            mask = [Media(name, (1, length), numbers=(1,), extent=(1, part)) for name in names]
            sounds.append((Media(SOUND, shapes[0], extent=shapes[1]), *mask))
        yield sounds


def _numbers(name: str, values: Sequence[int]) -> Media:
    return Media(name, (1, len(values)), numbers=tuple(values))
