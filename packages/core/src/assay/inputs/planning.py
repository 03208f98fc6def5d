"""Plan the batches of a check from its options and the model's limits."""

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from assay.errors import UsageError
from assay.inputs.batches import (
    Batch,
    Encode,
    InputPlan,
    Media,
    ModelLimits,
    Prompt,
    built_in_texts,
)
from assay.option_ranges import parse_count

# RoPE phases computed in bfloat16 differ by 3 times the noise below position 128 and by 190 times at
# 1,000 (transformers#29285), so one prompt has to be longer.
LONG_LENGTH = 1040
LONG_NEW_TOKENS = 4
LONG_PREFILL_CHUNK = 256
# The long prompt is made longer than windows up to this length. For larger windows it would cost more
# than all other prompts.
LONGEST = 2048
_BEYOND_WINDOW = 16


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Prompt lengths in tokens, including both ends."""

    low: int
    high: int


DEFAULT_LENGTHS = LengthRange(32, 96)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of `plan_batches`."""

    lengths: LengthRange | None = None
    """Cut given prompts to these lengths; None keeps them, and uses `DEFAULT_LENGTHS` for built-in ones."""
    batch_size: int = 4
    max_new_tokens: int = 32
    num_prompts: int = 8
    """Number of built-in prompts, which the seed selects."""
    seed: int = 0


def parse_lengths(text: str) -> LengthRange:
    """Parse `64` or `32:96`. Raises: UsageError."""
    low, separator, high = text.partition(":")
    if not low.isdecimal() or (separator and not high.isdecimal()):
        raise UsageError(f"prompt length {text!r} is neither a number nor a range such as 32:96")
    first, last = (parse_count("prompt length", part, 0) for part in (low, high or low))
    lengths = LengthRange(first, last)
    if not 1 <= lengths.low <= lengths.high:
        raise UsageError(f"prompt length {text!r}: needs 1 <= first <= last")
    return lengths


def plan_batches(
    limits: ModelLimits,
    options: BatchOptions,
    encode: Encode,
    prompts: Sequence[Prompt] | None = None,
) -> InputPlan:
    """Plan batches for `prompts`, or for built-in prompts and, unless lengths are given, a long one in chunks.

    Raises: UsageError if the model cannot take them.
    """
    if options.batch_size < 1 or options.max_new_tokens < 0 or options.num_prompts < 1:
        raise UsageError("batch size and prompts must be at least 1, new tokens at least 0")
    new_tokens = options.max_new_tokens if limits.can_generate else 0
    if not limits.has_tokens:
        prompts = [Prompt(None, ())] * options.num_prompts
    rng = random.Random(options.seed)  # noqa: S311 - reproducible, not secret
    places = _PLACES if prompts is None else ((),)
    if prompts is None:
        lengths, notes = _clipped(options.lengths or DEFAULT_LENGTHS, limits, new_tokens)
        prompts = _built_in_prompts(lengths, options, encode, rng)
        # Lengths that the user gave hold for every prompt.
        long_length, more_notes = (0, []) if options.lengths else _long_length(limits)
        notes += more_notes
        texts = rng.sample(built_in_texts(), len(built_in_texts()))
        long_prompt = _prompt_of(texts, 0, long_length, encode) if long_length else None
    else:
        notes = []
        prompts = _cut(prompts, options, rng)
        long_prompt = None
    _check_all(limits, prompts, new_tokens, long_prompt)
    batches: list[Batch] = []
    size = 1 if limits.reads_padding else options.batch_size
    if size < options.batch_size:
        notes.append("each text is a batch of its own: padding changes the results of this model")
    for start in range(0, len(prompts), size):
        members = prompts[start : start + size]
        numbers = tuple(range(start, start + len(members)))
        rows = tuple(_with_end(prompt.ids, limits) for prompt in members)
        batch = Batch(
            len(batches),
            rows,
            numbers,
            limits.pad_token_id,
            new_tokens,
            decoder_start=limits.decoder_start,
        )
        of_rows = [places[number % len(places)] for number in numbers]
        added = limits.optional if limits.optional and len(batches) % 2 == 0 else limits.media
        batch = insert_media(batch, replace(limits, media=added), options.seed, of_rows)
        batches.append(_with_given(batch, members))
    if long_prompt is not None:
        of_long = _PLACES[0] if limits.needs_image else ()
        batch = _long_batch(len(batches), len(prompts), long_prompt, limits)
        batches.append(insert_media(batch, limits, options.seed, (of_long,)))
        if limits.whole_prefill and len(long_prompt.ids) > LONG_PREFILL_CHUNK:
            notes.append(f"no prompt is read in chunks: {limits.whole_prefill}")
        prompts = [*prompts, long_prompt]
    notes += _notes_on(limits)
    prompts = [replace(prompt, media=()) for prompt in prompts]
    return InputPlan(tuple(batches), tuple(prompts), tuple(notes))


def _notes_on(limits: ModelLimits) -> Iterator[str]:
    if limits.optional:
        names = " and ".join(one.name for one in limits.optional if one not in limits.media)
        yield f"every second batch has {names}, without which a part of the model never runs"
    if limits.only_forward:
        yield f"one call is checked, and no generated text: {limits.only_forward}"
    if limits.no_media:
        yield f"no text holds an image or a sound: {limits.no_media}"


def _check_all(
    limits: ModelLimits, prompts: Sequence[Prompt], new_tokens: int, long_prompt: Prompt | None
) -> None:
    """Raise UsageError if the model cannot continue one of the prompts."""
    for number, prompt in enumerate(prompts if limits.has_tokens else ()):
        limits.check_ids(prompt.ids, new_tokens, f"prompt {number}")
    if long_prompt is not None:
        limits.check_ids(long_prompt.ids, LONG_NEW_TOKENS, "the long prompt")


def _with_given(batch: Batch, prompts: Sequence[Prompt]) -> Batch:
    """Return the batch with the media that the prompts have."""
    if not any(prompt.media for prompt in prompts):
        return batch
    own = batch.media or ((),) * len(prompts)
    media = tuple(prompt.media or one for prompt, one in zip(prompts, own, strict=True))
    return replace(batch, media=media)


# The places of the images in one text after another, as parts of its length.
_PLACES: tuple[tuple[float, ...], ...] = ((0.5,), (), (0.0, 0.7), (1.0,))


def insert_media(
    batch: Batch, limits: ModelLimits, seed: int, places: Sequence[Sequence[float]]
) -> Batch:
    """Return the batch with the media of each row, and images of alternating sizes at these places of each text.

    A text too long for the model's context is cut, and loses images that leave no token of it.
    """
    rows, media, marks = [], [], []
    room = (limits.max_positions or sys.maxsize) - batch.max_new_tokens
    for number, ids, wanted in zip(batch.prompts, batch.rows, places, strict=True):
        images = list(islice(cycle(limits.images), number, number + len(wanted)))
        while images and sum(len(image.ids) for image in images) >= room:
            images.pop()
        text = ids[: room - sum(len(image.ids) for image in images)]
        row, row_marks = list(text), [0] * len(text)
        for place, image in reversed([*zip(wanted, images, strict=False)]):
            start = int(place * len(text))
            row[start:start] = image.ids
            row_marks[start:start] = image.marks or [
                int(id_ in limits.placeholders) for id_ in image.ids
            ]
        rows.append(tuple(row))
        first = (seed + number) * len(_PLACES)
        of_images = [
            one if one.digest else replace(one, seed=first + order)
            for order, image in enumerate(images)
            for one in image.tensors
        ]
        media.append(of_images)
        marks.append(row_marks)
    described = [
        (
            *of_images,
            *(_of_row(one, seed + number, len(row)) for one in limits.media),
            *_describe_tokens(row, of_row, of_images, limits, has_images=any(media)),
        )
        for number, row, of_row, of_images in zip(batch.prompts, rows, marks, media, strict=True)
    ]
    if not any(described):
        return batch
    return replace(batch, rows=tuple(rows), media=tuple(described))


def _describe_tokens(
    row: Sequence[int],
    marks: Sequence[int],
    of_images: Sequence[Media],
    limits: ModelLimits,
    *,
    has_images: bool,
) -> Iterator[Media]:
    """Yield the tensors with a value for each token of a row. has_images: True if any row of the batch has one."""
    places = [column for column, id_ in enumerate(row) if id_ in limits.placeholders]
    for name in limits.marked_in:
        yield Media(name, (len(row),), numbers=tuple(marks), layout="token")
    if limits.seen_in and has_images:
        # A token attends to the last image before it.
        masks = [one for one in of_images if one.name == "aspect_ratio_mask"]
        num_tiles = max((one.shape[-1] for one in masks), default=1)
        numbers = tuple(
            int(start <= column < end and tile < (mask.extent or mask.shape)[-1])
            for column in range(len(row))
            for mask, start, end in zip(masks, places, [*places[1:], len(row)], strict=False)
            for tile in range(num_tiles)
        )
        shape = (len(row), len(masks), num_tiles)
        yield Media(limits.seen_in, shape, numbers=numbers, layout="token")


def _with_end(ids: tuple[int, ...], limits: ModelLimits) -> tuple[int, ...]:
    """Return the ids with the end token in place of the last one, if the model needs it."""
    return ids if limits.end_token_id is None else (*ids[:-1], limits.end_token_id)


def _of_row(media: Media, seed: int, length: int) -> Media:
    """Return the media of a row of this length. Whole numbers of tokens are those of the first ones; others get 0."""
    if media.layout == "token":
        given, shape = media.numbers, (length, *media.shape[1:])
        size = math.prod(shape)
        numbers = given and (*given, *[0] * (size - len(given)))[:size]
        media = replace(media, shape=shape, numbers=numbers)
    return media if media.digest else replace(media, seed=seed)


def _clipped(
    lengths: LengthRange, limits: ModelLimits, new_tokens: int
) -> tuple[LengthRange, list[str]]:
    if limits.max_positions is None:
        return lengths, []
    room = limits.max_positions - new_tokens
    if room < 1:
        raise UsageError(
            f"{new_tokens} new tokens leave no room for a prompt in the model's context of"
            f" {limits.max_positions}"
        )
    if lengths.high <= room:
        return lengths, []
    note = (
        f"prompts are cut to {room} tokens: the model's context is {limits.max_positions},"
        f" {new_tokens} of it for new tokens"
    )
    return LengthRange(min(lengths.low, room), room), [note]


def _built_in_prompts(
    lengths: LengthRange, options: BatchOptions, encode: Encode, rng: random.Random
) -> list[Prompt]:
    texts = rng.sample(built_in_texts(), len(built_in_texts()))
    sizes = _draw_lengths(lengths, options.num_prompts, options.batch_size, rng)
    return [_prompt_of(texts, start, size, encode) for start, size in enumerate(sizes)]


def _draw_lengths(
    lengths: LengthRange, count: int, batch_size: int, rng: random.Random
) -> list[int]:
    """Draw lengths, with at least two different ones in a batch if the range allows it."""
    sizes = [rng.randint(lengths.low, lengths.high) for _ in range(count)]
    for start in range(0, count, batch_size):
        batch = sizes[start : start + batch_size]
        if len(batch) > 1 and len(set(batch)) == 1 and lengths.low < lengths.high:
            sizes[start] = lengths.low if batch[0] == lengths.high else lengths.high
    return sizes


def _prompt_of(texts: Sequence[str], start: int, size: int, encode: Encode) -> Prompt:
    """Join texts from `start` on until they reach `size` tokens, and cut there."""
    text = texts[start % len(texts)]
    ids = encode(text)
    following = start + 1
    while len(ids) < size:
        text += "\n\n" + texts[following % len(texts)]
        ids = encode(text)
        following += 1
    return Prompt(text, tuple(ids[:size]))


def _cut(prompts: Sequence[Prompt], options: BatchOptions, rng: random.Random) -> list[Prompt]:
    if options.lengths is None:
        return list(prompts)
    sizes = _draw_lengths(options.lengths, len(prompts), options.batch_size, rng)
    return [
        prompt if prompt.media else Prompt(prompt.text, prompt.ids[:size])
        for prompt, size in zip(prompts, sizes, strict=True)
    ]


def _long_length(limits: ModelLimits) -> tuple[int, list[str]]:
    """Return the length of the long prompt (0 for none), and notes on uncovered cases."""
    size, notes = LONG_LENGTH, []
    if limits.sliding_window is not None:
        beyond = limits.sliding_window + _BEYOND_WINDOW
        if beyond <= LONGEST:
            size = max(size, beyond)
        else:
            notes.append(f"no prompt is longer than the sliding window of {limits.sliding_window}")
    if limits.max_positions is not None and size + LONG_NEW_TOKENS > limits.max_positions:
        wanted, size = size, max(0, limits.max_positions - LONG_NEW_TOKENS)
        notes.append(
            f"the long prompt has {size} instead of {wanted} tokens: the model's context is"
            f" {limits.max_positions}"
        )
    return size, notes


def _long_batch(number: int, prompt_number: int, prompt: Prompt, limits: ModelLimits) -> Batch:
    can_take_chunks = limits.can_generate and not limits.whole_prefill
    in_chunks = can_take_chunks and len(prompt.ids) > LONG_PREFILL_CHUNK
    return Batch(
        number,
        (_with_end(prompt.ids, limits),),
        (prompt_number,),
        limits.pad_token_id,
        LONG_NEW_TOKENS if limits.can_generate else 0,
        LONG_PREFILL_CHUNK if in_chunks else None,
        decoder_start=limits.decoder_start,
    )


_FAR = 1000


def describe_hard_cases(batches: Sequence[Batch], limits: ModelLimits) -> dict[str, bool | None]:
    """Map each hard case of texts to True if `batches` cover it, or None if the model cannot have it."""
    if not limits.has_tokens:
        return {}
    generates = limits.can_generate
    # The last new token is never an input.
    num_processed = [
        len(row) + max(0, batch.max_new_tokens - 1) for batch in batches for row in batch.rows
    ]
    window = limits.sliding_window
    far_possible = limits.max_positions is None or limits.max_positions > _FAR + 1
    of_media = [
        [any(one.layout != "token" for one in row) for row in batch.media] for batch in batches
    ]
    media = {
        "an image or a sound in a text": any(any(rows) for rows in of_media),
        "a text without one in the batch of a text with one": any(
            any(rows) and not all(rows) for rows in of_media
        ),
    }
    return (media if limits.images else {}) | {
        "padding": any(len({len(row) for row in batch.rows}) > 1 for batch in batches),
        "sequence longer than the sliding window": (
            None if window is None else any(length > window for length in num_processed)
        ),
        # The last of n tokens has position n - 1.
        "positions over 1,000": any(length - 1 > _FAR for length in num_processed)
        if far_possible
        else None,
        "chunked prefill": (
            any(
                batch.prefill_chunk is not None and batch.length > batch.prefill_chunk
                for batch in batches
            )
            if generates and not limits.whole_prefill
            else None
        ),
        # The first new token comes from the prefill.
        "decode with a cache": (
            any(batch.max_new_tokens > 1 for batch in batches) if generates else None
        ),
    }
