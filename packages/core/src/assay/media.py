"""Find the images, videos or sounds that a model takes, alone or inside a text, and its other limits."""

import inspect
import linecache
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from assay.errors import AssayError, UsageError
from assay.inputs import (
    LONG_LENGTH,
    Batch,
    InsertedMedia,
    Media,
    ModelLimits,
    Prompt,
    PromptLine,
    document_arguments,
    insert_media,
    join_media,
    likely_tensors,
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
    if next(loaded.model.parameters()).is_meta:  # generation reads values
        run = _call
    if loaded.media_input:
        ends = (id_ for id_ in loaded.eos_token_ids if id_ < loaded.vocab_size)
        limits = replace(
            limits,
            has_tokens=loaded.reads_tokens,
            end_token_id=next(ends, None) if loaded.reads_tokens else None,
        )
        return replace(limits, media=_find_media(loaded, limits, run))
    if loaded.media_token_id is not None:
        return _with_images(loaded, limits, loaded.media_token_id, processing, run)
    return limits


@torch.no_grad()
def _find_media(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> tuple[Media, ...]:
    """Return an image, video or sound of a shape that the model takes, with the other tensors that it needs.

    All likely ones are tried on the model, alone before documented tensors are added to them.
    Raises: UsageError if it takes none of them.
    """
    error: Exception | None = None
    for search, media in product((_try, _complete), [*_likely_media(loaded)]):
        try:
            return search(loaded, replace(limits, media=media), run).media
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = raised if error is None or _is_final(raised) else error
    reason = f": {first_line(error.__cause__ or error)}" if error is not None else ""
    name = type(loaded.model).__name__
    raise UsageError(
        f"{name} takes {loaded.media_input} of a shape that is not known{reason}"
    ) from error


def _try(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> ModelLimits:
    """Run the model on a short text with its media, next to one without images.

    Returns: `limits`. Raises: what the model raises.
    """
    special = {loaded.pad_token_id, *limits.placeholders}
    token = next((id_ for id_ in range(loaded.vocab_size) if id_ not in special), 0)
    rows = ((token,) * 4, (token,) * 3)[: 2 if limits.images else 1]
    batch = Batch(
        0,
        rows if limits.has_tokens else ((),),
        (*range(len(rows)),),
        loaded.pad_token_id,
        2 if loaded.can_generate else 0,
        decoder_start=loaded.decoder_start,
    )
    run(loaded, insert_media(batch, limits, 0, ((0.0, 0.7), ())[: len(rows)]))
    return limits


# Calls of a model in search of what it lacks, and tensors that it gets in all.
_MOST_CALLS, _MOST_TENSORS = 60, 8


def _complete(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> ModelLimits:
    """Return the limits with the documented tensors that the model lacks. Raises: what it raises without them."""
    calls_left = iter(range(_MOST_CALLS))

    def extend(given: tuple[Media, ...]) -> tuple[Media, ...] | Exception:
        try:
            _try(loaded, replace(limits, media=given), run)
        except Exception as raised:
            if _is_final(raised):
                raise
            error = raised
        else:
            return given
        for more in _extensions(loaded, given, error.__cause__ or error):
            if next(calls_left, None) is None:
                break
            found = extend(more)
            if not isinstance(found, Exception):
                return found
        return error

    found = extend(limits.media)
    if isinstance(found, Exception):
        raise found
    added = found[len(limits.media) :]
    for one in added:  # such as a mask named next to the ids that it belongs to
        fewer = tuple(other for other in found if other is not one)
        with suppress(Exception):
            _try(loaded, replace(limits, media=fewer), run)
            found = fewer
    return replace(limits, media=found)


def _is_final(error: Exception) -> bool:
    """Return True if the model lacks nothing: it counts the tokens of an image, or assay refuses its output."""
    is_refusal = isinstance(error, AssayError) and error.__cause__ is None
    return is_refusal or _NUM_FEATURES.search(str(error.__cause__ or error)) is not None


def _extensions(
    loaded: LoadedModel, given: tuple[Media, ...], error: BaseException
) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors with the last one in another size, or with one more, as an exception asks for."""
    if given:
        yield from ((*given[:-1], one) for one in _resized(given[-1], error))
    documented = document_arguments(loaded.model.forward)
    names = {one.name for one in given}
    for name in _list_lacking(error, documented) if len(given) < _MOST_TENSORS else ():
        if name not in names:
            if name.endswith("mask") and given:  # of a sound
                for length in sorted(given[0].shape[1:], reverse=True):
                    yield *given, Media(name, (1, length), numbers=(1,))
                    yield *given, Media.of_tensor(name, torch.ones(1, length, dtype=torch.bool))
            for one in _likely_values(loaded, name, documented):
                yield *given, one


def _likely_values(
    loaded: LoadedModel, name: str, documented: Mapping[str, tuple[str, str]]
) -> Iterator[Media]:
    read = _Settings(loaded.model).read
    yield from likely_tensors(name, documented, read, of_tokens=loaded.reads_tokens)


def _list_lacking(error: BaseException, documented: Collection[str]) -> list[str]:
    """List the arguments that an exception's message names, then those that are None where it passed, the innermost first.

    Masks come last: the code makes them from the tensors that they belong to.
    """
    named = [re.findall(r"\w+", str(error))]
    passed, step = [], error.__traceback__
    while step is not None:
        frame, code = step.tb_frame, step.tb_frame.f_code
        start, end, *_ = next(islice(code.co_positions(), step.tb_lasti // 2, None))
        lines = linecache.getlines(code.co_filename)[(start or 1) - 1 : end]
        words = re.findall(r"\w+", "".join(lines))
        passed.append([one for one in words if frame.f_locals.get(one, 0) is None])
        step = step.tb_next
    found = dict.fromkeys(one for one in chain(*named, *reversed(passed)) if one in documented)
    return sorted(found, key=lambda one: "mask" in one)


# Messages of torch and transformers about a tensor of another width, number of channels, or height and width.
_OTHER_WIDTHS = (
    re.compile(r"cannot be multiplied \(\d+x(?P<actual>\d+) and (?P<expected>\d+)x"),
    re.compile(r"normalized_shape=\[(?P<expected>\d+)\].* size ?\[.*?(?P<actual>\d+)\]"),
    re.compile(r"to have (?P<expected>\d+) channels, but got (?P<actual>\d+)"),
)
_OTHER_LENGTH = re.compile(r"length (\d+) is not a multiple of (\d+)")
_OTHER_SIDES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_OTHER_SIZE = re.compile(r"\(\d+\*\d+\) doesn't match model \((\d+)\*(\d+)\)")


def _resized(media: Media, error: BaseException) -> Iterator[Media]:
    """Yield the tensor in the size that an exception's message asks for."""
    shape, message = media.shape, str(error)
    if size := _OTHER_SIZE.search(message):
        yield replace(media, shape=(*shape[:-2], *map(int, size.groups())))
    if (sides := _OTHER_SIDES.search(message)) and len(shape) > 3:
        for part, whole in permutations(map(int, sides.groups())):
            yield replace(media, shape=(*shape[:-2], *(one * part // whole for one in shape[-2:])))
    if length := _OTHER_LENGTH.search(message):
        actual, unit = map(int, length.groups())
        yield replace(media, shape=(*shape[:-1], actual + -actual % unit))
    for width in filter(None, (one.search(message) for one in _OTHER_WIDTHS)):
        expected, actual = int(width["expected"]), int(width["actual"])
        if actual in shape[1:]:
            found = tuple(expected if one == actual else one for one in shape[1:])
        else:  # the code takes some columns away
            found = (*shape[1:-1], shape[-1] + expected - actual)
        if media.numbers is None and min(found) > 0:
            yield replace(media, shape=(shape[0], *found))


def _likely_media(loaded: LoadedModel) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors of one row of the model's argument for images or sounds."""
    name, model = loaded.media_input, loaded.model
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
    documented = document_arguments(model.forward)
    if name in documented:
        for one in _likely_values(loaded, name, documented):
            yield (one,)


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
    """Add the tensors that the model needs in addition to its other inputs, or that make more of its modules run.

    A model on the meta device gets none.
    run: calls the model with a batch. Raises: what the model raises without what it needs.
    """
    model: Any = loaded.model
    if next(model.parameters()).is_meta:
        return limits
    limits = _complete(loaded, limits, run)
    idle = {name for name, one in model.named_modules() if [*one.parameters(recurse=False)]}
    idle -= {"", *_list_called(loaded, limits, run)}
    documented = document_arguments(model.forward)
    needed, media = limits.media, limits.media
    for name in documented:
        if not idle or name in {one.name for one in media}:
            continue
        for one in _likely_values(loaded, name, documented):
            with suppress(Exception):  # code of the model
                found = _complete(loaded, replace(limits, media=(*media, one)), run)
                if called := idle & _list_called(loaded, found, run):
                    idle -= called
                    media = found.media
                break
    # Further outputs, such as scores of entities, have to come with every batch.
    if loaded.can_generate and not needed:
        return replace(limits, optional=media)
    return replace(limits, media=media)


def _list_called(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> set[str]:
    """Return the modules that run with the media of `limits`."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in loaded.model.named_modules()
    ]
    try:
        _try(loaded, limits, run)
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
        partial(_sized_images, sizes, partial(_count_tokens, loaded, limits, run), placeholder)
        for sizes in _likely_images(_Settings(model).read, arguments)
    ]
    if isinstance(processing, ImageProcessing):
        ways.insert(0, partial(_processed_images, processing, arguments))
    error: BaseException | None = None
    for make in ways:
        try:
            images = tuple(_surrounded(image, *around) for image in make())
            found = replace(limits, images=images)
            if not images:
                raise ValueError("no size of an image is known")  # noqa: TRY301 - as those of the model
            return _complete(loaded, found, run)
        except Exception as raised:  # noqa: BLE001 - code of models and processors raises anything
            error = error or raised.__cause__ or raised
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
    sizes: Sequence[tuple[Media, ...]],
    count_tokens: Callable[[tuple[Media, ...]], int],
    placeholder: int,
) -> Iterator[InsertedMedia]:
    """Yield images of those sizes that the model takes. Raises: what its tower raises if it takes none."""
    error: Exception | None = None
    num_found = 0
    for tensors in sizes:
        try:
            num_tokens = count_tokens(tensors)
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = error or raised
        else:
            num_found += 1
            yield InsertedMedia(tensors, (placeholder,) * num_tokens)
    if error is not None and not num_found:
        raise error


# In the message of a model that got another number of tokens.
_NUM_FEATURES = re.compile(r"features: (\d+)")


def _count_tokens(
    loaded: LoadedModel,
    limits: ModelLimits,
    run: Callable[[LoadedModel, Batch], object],
    tensors: tuple[Media, ...],
) -> int:
    """Return the number of tokens that an image or sound takes: its features, or 1 for a model that tells none."""
    model: Any = loaded.model
    owners = (getattr(model, "model", None), model)  # the outer one may not name its arguments
    kind = "audio" if tensors[0].name == _SOUND else "image"
    functions = (getattr(owner, f"get_{kind}_features", None) for owner in owners)
    function = next((one for one in functions if one is not None), None)
    inputs = on_model(join_media([tensors]), next(model.parameters()))
    known = inspect.signature(function).parameters if function is not None else {}
    needed = {name for name, one in known.items() if one.default is inspect.Parameter.empty}
    if function is None or "input_ids" in known or needed - {*inputs, "kwargs"}:
        images = (InsertedMedia(tensors, limits.placeholders),)
        try:
            _complete(loaded, replace(limits, images=images), run)
        except Exception as error:  # noqa: BLE001 - code of the model
            named = _NUM_FEATURES.search(str(error.__cause__ or error))
            return int(named[1]) // 2 if named is not None else 1  # the trial has two images
        return 1
    result = function(**{name: value for name, value in inputs.items() if name in known})
    features = getattr(result, "pooler_output", result)
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.shape[:-1].numel() for part in parts)


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
        yield from _likely_sounds(read, arguments) if _SOUND in arguments else ()
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
