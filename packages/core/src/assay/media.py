"""Find the images, videos or sounds that a model takes, alone or inside a text, and its other limits."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.inputs import (
    LONG_LENGTH,
    Batch,
    InsertedMedia,
    Media,
    ModelLimits,
    Prompt,
    PromptLine,
    draw_media,
    insert_media,
    join_media,
    limits_of,
)
from assay.models import LoadedModel
from assay.models.config_files import first_line
from assay.models.image_processing import (
    EncodedText,
    ImageProcessing,
    draw_image,
    load_image_processing,
)

# Samples of a sound: a quarter of a second at 16 kHz. Frames of a spectrogram: nearly a second, a multiple of the
# usual factors of subsampling.
_NUM_SAMPLES, _NUM_FRAMES = 4000, 96


def find_processing(loaded: LoadedModel) -> ImageProcessing | str:
    """Return the processor of a model that reads images in texts, or the reason why it has none."""
    if loaded.media_token_id is None:
        return f"{type(loaded.model).__name__} reads no images in texts"
    try:
        return load_image_processing(loaded.source, loaded.media_token_id)
    except Exception as error:  # noqa: BLE001 - code of a processor, or a package that it lacks
        return f"the model's processor cannot be used: {first_line(error)}"


def encode_images(line: PromptLine, processing: ImageProcessing | str, *, as_chat: bool) -> Prompt:
    """Encode a line of a prompts file with its images.

    processing: the model's processor, or the reason why it has none.
    Raises: UsageError.
    """
    if isinstance(processing, str):
        raise UsageError(f"{line.where}: images cannot be read: {processing}")
    from PIL import Image

    try:
        images = [Image.open(path).convert("RGB") for path in line.images]
        text = processing.apply_chat(line.value, len(images)) if as_chat else line.value
        encoded = processing.encode(text, images)
    except Exception as error:
        raise UsageError(f"{line.where}: images cannot be read: {first_line(error)}") from error
    return Prompt(line.value, encoded.ids, tuple(_media_of(encoded)))


def _media_of(encoded: EncodedText) -> Iterator[Media]:
    for name, tensor in encoded.tensors.items():
        yield Media.of_tensor(name, tensor, encoded.layouts[name])


def model_inputs(batch: Batch, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors of `batch` for `forward` and `generate`, as `parameter` needs them."""
    inputs = batch.inputs
    if batch.decoder_input_ids is not None:
        inputs["decoder_input_ids"] = batch.decoder_input_ids
    return on_model(inputs, parameter)


def on_model(inputs: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Copy `inputs` to the device of a parameter; floating-point ones get its dtype."""
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _call(loaded: LoadedModel, batch: Batch) -> object:
    model: Any = loaded.model
    return model(**model_inputs(batch, next(model.parameters())))


def find_input_limits(
    loaded: LoadedModel,
    processing: ImageProcessing | str = "",
    run: Callable[[LoadedModel, Batch], object] = _call,
) -> ModelLimits:
    """Return the limits of the model's inputs, with images and sounds of sizes that it takes.

    processing: makes the images of texts; a reason if the model's configuration has to do.
    run: tries the images of texts on the model.
    """
    limits = limits_of(loaded)
    if loaded.media_input:
        media = find_media(loaded)
        ends = (id_ for id_ in loaded.eos_token_ids if id_ < loaded.vocab_size)
        return replace(
            limits,
            media=media,
            has_tokens=loaded.reads_tokens,
            end_token_id=next(ends, None) if loaded.reads_tokens else None,
        )
    if loaded.media_token_id is not None:
        return _with_images(loaded, limits, loaded.media_token_id, processing, run)
    return limits


@torch.no_grad()
def find_media(loaded: LoadedModel) -> tuple[Media, ...]:
    """Return an image, video or sound of a shape that the model takes, with the mask of patches that it names.

    All likely ones are tried on the model. Raises: UsageError if it takes none of them.
    """
    model: Any = loaded.model
    parameter = next(model.parameters())
    error: Exception | None = None
    for media in _likely_media(loaded.media_input, model):
        inputs = on_model(join_media([media]), parameter)
        ids = torch.tensor([loaded.decoder_start or (1, 2, 3)], device=parameter.device)
        if loaded.decoder_start:
            inputs["decoder_input_ids"] = ids
        elif loaded.reads_tokens:
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            model(**inputs)
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = error or raised
        else:
            return media
    reason = f": {first_line(error)}" if error is not None else ""
    name = type(model).__name__
    raise UsageError(f"{name} takes {loaded.media_input} of a shape that is not known{reason}")


def _likely_media(name: str, model: nn.Module) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors of one row of the argument `name`."""
    arguments = inspect.signature(model.forward).parameters
    read = _Settings(model).read
    for sizes in _packed_images(name, read, arguments):
        yield sizes[0]
    if name == "past_values":
        yield _make_series(name, read, arguments)
    for shape in _likely_shapes(name, model):
        media = Media(name, (1, *shape))
        if _PATCH_MASK in arguments:
            yield media, _mask_patches(model, shape)
        yield (media,)
    for sizes in _likely_images(read, arguments):
        yield sizes[0]


def _make_series(
    name: str, read: Callable[..., Any], arguments: Mapping[str, object]
) -> tuple[Media, ...]:
    """Return one time series, and the other tensors that the model's forward call accepts with it."""
    length = (read("context_length") or _NUM_FRAMES) + max(read("lags_sequence") or [0])
    ahead, num_features = read("prediction_length") or 1, read("num_time_features") or 0
    num_channels, size = read("num_input_channels"), read("input_size") or 1
    channels = (num_channels or size,) if num_channels or size > 1 else ()
    past = (1, length, *channels)
    others = (
        Media("past_time_features", (1, length, num_features), numbers=(1,)),
        Media("past_observed_mask", past, numbers=(1,)),
        Media("past_values_padding", past, numbers=(0,)),
        Media("freq", (1, 1), numbers=(0,)),
        Media("future_values", (1, ahead, *channels)),
        Media("future_time_features", (1, ahead, num_features), numbers=(1,)),
    )
    return Media(name, past), *(one for one in others if one.name in arguments)


_PATCH_MASK = "bool_masked_pos"


def _mask_patches(model: nn.Module, shape: Sequence[int]) -> Media:
    """Return a mask, (1, patches) bool, of every third patch of an image or video, (..., H, W)."""
    read = _Settings(model).read
    patch = read("patch_size") or 16
    sides = patch if isinstance(patch, list | tuple) else (patch, patch)
    num_patches = math.prod(size // side for size, side in zip(shape[-2:], sides, strict=True))
    if len(shape) > 3:
        num_patches *= shape[0] // (read("tubelet_size") or 1)
    return Media.of_tensor(_PATCH_MASK, torch.arange(num_patches)[None] % 3 == 0)


def _likely_shapes(name: str, model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of one row of the argument `name`, without its batch."""
    read = _Settings(model).read
    if name.startswith("pixel_values"):
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


@torch.no_grad()
def with_additions(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> ModelLimits:
    """Add the tensors that the model needs in addition to token ids, or that make more of its modules run.

    A model on the meta device gets none. run: calls the model with a batch.
    """
    model: Any = loaded.model
    arguments = inspect.signature(model.forward).parameters
    known = [
        one
        for one in _likely_additions(_Settings(model).read)
        if all(media.name in arguments and None not in media.shape for media in one)
    ]
    if next(model.parameters()).is_meta or not known:
        return limits
    plain = _list_called(loaded, limits, run, ())
    called = [_list_called(loaded, limits, run, one) for one in known]
    if not plain:
        needed = next((one for one, names in zip(known, called, strict=True) if names), ())
        return replace(limits, media=needed)
    found = (one for one, names in zip(known, called, strict=True) if names - plain)
    added = tuple(chain.from_iterable(found))
    # Further outputs, such as scores of entities, have to come with every batch.
    return replace(limits, optional=added) if loaded.can_generate else replace(limits, media=added)


def _likely_additions(read: Callable[..., Any]) -> Iterator[tuple[Media, ...]]:
    """Yield tensors that belong to one text: states of an encoder, regions of an image, places on a page."""
    width = read("cross_attention_hidden_size", "encoder_hidden_size", "d_model", "hidden_size")
    yield (Media("encoder_hidden_states", (1, 6, width)),)
    yield (Media("visual_embeds", (1, 4, read("visual_embedding_dim"))),)
    yield (
        Media("visual_feats", (1, 4, read("visual_feat_dim"))),
        Media("visual_pos", (1, 4, read("visual_pos_dim"))),
    )
    yield (Media("bbox", (1, 4), layout="token"),)
    mentions = Media("entity_position_ids", (1, 2, 2), numbers=(0, 1, 2, -1))
    yield Media("entity_ids", (1, 2), numbers=(1, 2)), mentions
    # The first token of a text attends to all others.
    yield (Media("global_attention_mask", (1,), numbers=(1,), layout="token"),)


def _list_called(
    loaded: LoadedModel,
    limits: ModelLimits,
    run: Callable[[LoadedModel, Batch], object],
    media: tuple[Media, ...],
) -> set[str]:
    """Return the modules that run with these tensors next to a text; none if the model raises."""
    token = next(id_ for id_ in range(loaded.vocab_size) if id_ != loaded.pad_token_id)
    row = (token,) * 4
    batch = Batch(
        0,
        (row,),
        (0,),
        loaded.pad_token_id,
        2 if loaded.can_generate else 0,
        media=draw_media(media, 0, (0,), (row,)),
        decoder_start=limits.decoder_start,
    )
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in loaded.model.named_modules()
    ]
    try:
        run(loaded, batch)
    except Exception:  # noqa: BLE001 - code of the model
        return set()
    finally:
        for hook in hooks:
            hook.remove()
    return called


class _Settings:
    """A configuration and those inside it, in which the same setting has several names."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - any Hugging Face model
        parts = (value for value in vars(model.config).values() if hasattr(value, "model_type"))
        self._parts = [model.config, *parts]

    def read(self, *keys: str) -> Any:  # noqa: ANN401 - a value of a configuration
        """Return the first value that is not None."""
        found = (getattr(part, key, None) for key in keys for part in self._parts)
        return next((value for value in found if value is not None), None)


# Height and width of images for models without a size of their own.
_SIZE = 64


def _image_size(read: Callable[..., Any]) -> tuple[int, int]:
    """Return height and width of an image."""
    size = read("image_size", "input_size", "img_size") or _SIZE
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


# Arguments that mark the tokens of an image, and settings with the tokens around an image.
_MARKS = re.compile(r"(\w+_)?token_type_ids")
_BEGIN = re.compile(r"(boi|(image|vision)_(start|bos))_token_(id|index)")
_END = re.compile(r"(eoi|(image|vision)_end)_token_(id|index)")


@torch.no_grad()
def _with_images(
    loaded: LoadedModel,
    limits: ModelLimits,
    placeholder: int,
    processing: ImageProcessing | str,
    run: Callable[[LoadedModel, Batch], object],
) -> ModelLimits:
    """Return the limits with images for the texts, which are tried on the model in the order of likelihood.

    Without values (an outline), texts hold no image.
    """
    model: Any = loaded.model
    if next(model.parameters()).is_meta:
        return limits
    arguments = inspect.signature(model.forward).parameters
    marked_in = tuple(name for name in arguments if _MARKS.fullmatch(name))
    seen_in = next((name for name in arguments if name == "cross_attention_mask"), "")
    limits = replace(limits, placeholders=(placeholder,), marked_in=marked_in, seen_in=seen_in)
    around = [
        tuple(
            id_
            for name, id_ in vars(model.config).items()
            if form.fullmatch(name) and isinstance(id_, int) and 0 <= id_ < limits.vocab_size
        )[:1]
        for form in (_BEGIN, _END)
    ]
    ways: list[Callable[[], Iterator[InsertedMedia]]] = [
        partial(_sized_images, model, sizes, placeholder)
        for sizes in _likely_images(_Settings(model).read, arguments)
    ]
    if isinstance(processing, ImageProcessing):
        ways.insert(0, partial(_processed_images, processing, arguments))
    error: BaseException | None = None
    for make in ways:
        try:
            images = tuple(_surrounded(image, *around) for image in make())
            found = replace(limits, images=images)
            _try_images(loaded, found, run)
        except Exception as raised:  # noqa: BLE001 - code of models and processors raises anything
            error = error or raised.__cause__ or raised
        else:
            return found
    reason = "" if error is None else f": {first_line(error)}"
    name = type(model).__name__
    return replace(limits, no_media=f"{name} takes them in a form that is not known{reason}")


def _surrounded(
    image: InsertedMedia, begin: tuple[int, ...], end: tuple[int, ...]
) -> InsertedMedia:
    """Return the image between the tokens that begin and end one, unless it has them."""
    if {*begin, *end} & {*image.ids}:
        return image
    marks = image.marks and (*[0] * len(begin), *image.marks, *[0] * len(end))
    return replace(image, ids=(*begin, *image.ids, *end), marks=marks)


# Heights and widths in pixels. Each is drawn twice, so that the images of a batch differ.
_PIXELS = ((84, 140), (140, 84), (112, 112))


def _processed_images(
    processing: ImageProcessing, arguments: Mapping[str, object]
) -> Iterator[InsertedMedia]:
    """Yield images as the processor of the model encodes them. Raises: ValueError if they take too many tokens."""
    generator = torch.Generator().manual_seed(0)
    around = processing.encode_text("")
    for size in 2 * _PIXELS:
        encoded = processing.encode(processing.token, [draw_image(generator, *size)])
        start, stop = 0, len(encoded.ids)
        while start < len(around) and encoded.ids[start] == around[start]:
            start += 1
        if rest := len(around) - start:
            stop -= rest * (encoded.ids[-rest:] == around[start:])
        if stop - start > LONG_LENGTH:
            raise ValueError(f"an image takes {stop - start} tokens")
        marks = [one[start:stop] for name, one in encoded.tensors.items() if _MARKS.fullmatch(name)]
        yield InsertedMedia(
            tuple(
                media
                for media in _media_of(encoded)
                if media.layout != "token" and media.name in arguments
            ),
            encoded.ids[start:stop],
            tuple(marks[0].tolist()) if marks else (),
        )


def _sized_images(
    model: nn.Module, sizes: Sequence[tuple[Media, ...]], placeholder: int
) -> Iterator[InsertedMedia]:
    """Yield images of those sizes that the model takes. Raises: what its tower raises if it takes none."""
    error: Exception | None = None
    num_found = 0
    for tensors in sizes:
        try:
            num_tokens = _count_tokens(model, tensors, placeholder)
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = error or raised
        else:
            num_found += 1
            yield InsertedMedia(tensors, (placeholder,) * num_tokens)
    if error is not None and not num_found:
        raise error


# In the message of a model that got another number of tokens.
_NUM_FEATURES = re.compile(r"features: (\d+)")


def _count_tokens(model: Any, tensors: Sequence[Media], placeholder: int) -> int:  # noqa: ANN401 - as `_Settings`
    """Return the number of tokens that an image or sound takes: its features, or 1 for a model that tells none."""
    owners = (getattr(model, "model", None), model)  # the outer one may not name its arguments
    kind = "audio" if tensors[0].name == _SOUND else "image"
    functions = (getattr(owner, f"get_{kind}_features", None) for owner in owners)
    function = next((one for one in functions if one is not None), None)
    parameter = next(model.parameters())
    inputs = on_model(join_media([tensors]), parameter)
    known = inspect.signature(function).parameters if function is not None else {}
    if function is None or "input_ids" in known:
        ids = torch.tensor([[0, placeholder, placeholder, 0]], device=parameter.device)
        try:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
        except Exception as error:  # noqa: BLE001 - code of the model
            named = _NUM_FEATURES.search(str(error))
            return int(named[1]) if named is not None else 1
        return 1
    result = function(**{name: value for name, value in inputs.items() if name in known})
    features = getattr(result, "pooler_output", result)
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.shape[:-1].numel() for part in parts)


def _try_images(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> None:
    """Run the model on a text with two images next to one without. Raises: what the model raises."""
    if not limits.images:
        raise ValueError("no size of an image is known")
    special = {loaded.pad_token_id, *limits.placeholders}
    token = next(id_ for id_ in range(loaded.vocab_size) if id_ not in special)
    rows = ((token,) * 4, (token,) * 3)
    batch = Batch(
        0,
        rows,
        (0, 1),
        loaded.pad_token_id,
        2,
        decoder_start=limits.decoder_start,
    )
    batch = insert_media(batch, limits, 0, ((0.0, 0.7), ()))
    run(loaded, batch)


_SOUND = "input_features"


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
        for of_patch, unit in (
            ((channels * depth * patch**2,), 1),
            ((channels, patch, patch), 1),
            ((side, side, channels), merge),
        ):
            yield [
                (
                    Media(name, (high * wide // unit**2, *of_patch)),
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


def _likely_images(
    read: Callable[..., Any], arguments: Mapping[str, object]
) -> Iterator[list[tuple[Media, ...]]]:
    """Yield the tensors of one image, for several sizes, in each form that a model may take."""
    if "pixel_values" not in arguments:
        yield from _likely_sounds(read, arguments)
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
    for is_wide in (True, False):
        sounds = []
        for part in (length, 2 * length // 3):
            shapes = [(1, width, one) if is_wide else (1, one, width) for one in (length, part)]
            mask = [Media(name, (1, length), numbers=(1,), extent=(1, part)) for name in masks]
            sounds.append((Media(_SOUND, shapes[0], extent=shapes[1]), *mask))
        yield sounds


def _numbers(name: str, values: Sequence[int]) -> Media:
    return Media(name, (1, len(values)), numbers=tuple(values))
