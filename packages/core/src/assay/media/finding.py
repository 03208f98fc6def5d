"""Find the images, videos or sounds that a model takes, alone or inside a text, and its other limits."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
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
    join_media,
    limits_of,
)
from assay.media.forms import SOUND, likely_images, likely_media
from assay.media.lacking import NUM_FEATURES, complete, is_final, try_inputs, without_frames
from assay.models import LoadedModel
from assay.models.config_files import Settings, first_line
from assay.models.image_processing import (
    EncodedText,
    ImageProcessing,
    draw_image,
    load_image_processing,
)
from assay.models.load import IMAGE_PLACES


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
    model: Any = loaded.model
    name = type(model).__name__
    kind = inspect.signature(model.forward).parameters[loaded.media_input].annotation
    if type(model).forward is nn.Module.forward:
        raise UsageError(f"{name} has no forward call")
    if isinstance(kind, type) and not issubclass(kind, (Tensor, inspect.Parameter.empty)):
        raise UsageError(f"{name} takes {loaded.media_input}, which is no tensor: {kind.__name__}")
    error: Exception | None = None
    for search, media in product((try_inputs, complete), [*likely_media(loaded)]):
        try:
            return search(loaded, replace(limits, media=media), run).media
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = without_frames(raised) if error is None or is_final(raised) else error
    reason = f": {first_line(error.__cause__ or error)}" if error is not None else ""
    raise UsageError(
        f"{name} takes {loaded.media_input} of a shape that is not known{reason}"
    ) from error


# Arguments that mark the tokens of an image, and settings with the tokens around an image.
_MARKS = re.compile(rf"(\w+_)?token_type_ids|{IMAGE_PLACES.pattern}")
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
        for sizes in likely_images(Settings(model.config).read, arguments)
    ]
    if isinstance(processing, ImageProcessing):
        ways.insert(0, partial(_processed_images, processing, arguments))
    error: Exception | None = None
    for make in ways:
        try:
            images = tuple(_surrounded(image, *around) for image in make())
            found = replace(limits, images=images)
            if not images:
                raise ValueError("no size of an image is known")  # noqa: TRY301 - as those of the model
            found = complete(loaded, found, run)
        except Exception as raised:  # noqa: BLE001 - code of models and processors raises anything
            error = error or without_frames(raised)
        else:
            with suppress(Exception):  # code of the model
                try_inputs(loaded, replace(found, images=()), run)
                return found
            return replace(found, needs_image=True)
    reason = "" if error is None else f": {first_line(error.__cause__ or error)}"
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
            error = error or without_frames(raised)
        else:
            num_found += 1
            yield InsertedMedia(tensors, (placeholder,) * num_tokens)
    if error is not None and not num_found:
        raise error


def _count_tokens(
    loaded: LoadedModel,
    limits: ModelLimits,
    run: Callable[[LoadedModel, Batch], object],
    tensors: tuple[Media, ...],
) -> int:
    """Return the number of tokens that an image or sound takes: its features, or 1 for a model that tells none."""
    model: Any = loaded.model
    owners = (*model.children(), model)  # the outer one may not name its arguments
    kind = "audio" if tensors[0].name == SOUND else "image"
    functions = (getattr(owner, f"get_{kind}_features", None) for owner in owners)
    function = next((one for one in functions if one is not None), None)
    inputs = on_model(join_media([tensors]), next(model.parameters()))
    known = inspect.signature(function).parameters if function is not None else {}
    needed = {name for name, one in known.items() if one.default is inspect.Parameter.empty}
    if function is None or "input_ids" in known or needed - {*inputs, "kwargs"}:
        # Some accept one token for each sound in an old form of their texts.
        for num_tokens, search in ((2, try_inputs), (1, complete)):
            images = (InsertedMedia(tensors, num_tokens * limits.placeholders),)
            try:
                search(loaded, replace(limits, images=images), run)
            except Exception as error:  # noqa: BLE001 - code of the model
                if named := NUM_FEATURES.search(str(error.__cause__ or error)):
                    return int(named[1]) // 2  # the trial has two images
        return 1
    result = function(**{name: value for name, value in inputs.items() if name in known})
    features = getattr(result, "pooler_output", result)
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.shape[:-1].numel() for part in parts)
