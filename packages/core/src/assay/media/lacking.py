"""Find the tensors that a model lacks, by what it raises without them."""

import linecache
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, permutations
from typing import Any, Protocol

import torch

from assay.errors import AssayError
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler
from assay.inputs import (
    Batch,
    Media,
    ModelLimits,
    document_arguments,
    insert_media,
)
from assay.media.forms import likely_values
from assay.models import LoadedModel


def try_inputs(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], object]
) -> ModelLimits:
    """Run the model on a short text with its media, next to one without images.

    Returns: `limits`. Raises: what the model raises.
    """
    special = {loaded.pad_token_id, *limits.placeholders}
    token = next((id_ for id_ in range(loaded.vocab_size) if id_ not in special), 0)
    end = token if limits.end_token_id is None else limits.end_token_id
    # Five tokens: a tensor of few elements that is not one for each token does not fit by chance.
    rows: tuple[tuple[int, ...], ...] = ((token,) * 4 + (end,), (token,) * 2 + (end,))
    rows = rows[: 2 if limits.images else 1]
    if not limits.has_tokens:  # one row may broadcast a tensor that several do not
        rows = ((),) * (2 if len(limits.media) > 1 else 1)
    batch = Batch(
        0,
        rows,
        (*range(len(rows)),),
        loaded.pad_token_id,
        2 if loaded.can_generate else 0,
        decoder_start=loaded.decoder_start,
    )
    run(loaded, insert_media(batch, limits, 0, ((0.0, 0.7), ())[: len(rows)]))
    return limits


# In the message of a model that got two tensors of which it takes one.
_EXCLUDING = re.compile(r"(?i)\b(only|exactly) one of\b")
# Calls of a model in search of what it lacks, or of what else goes with a tensor that it can do without; tensors that
# it gets in all, and elements of one in another size.
_MOST_CALLS, _MOST_FURTHER_CALLS, _MOST_TENSORS, _MOST_ELEMENTS = 60, 12, 8, 1 << 20


def complete(
    loaded: LoadedModel,
    limits: ModelLimits,
    run: Callable[[LoadedModel, Batch], object],
    most_calls: int = _MOST_CALLS,
) -> ModelLimits:
    """Return the limits with the documented tensors that the model lacks. Raises: what it raises without them."""
    tried = {limits.media}

    def extend(given: tuple[Media, ...]) -> tuple[Media, ...] | Exception:
        try:
            try_inputs(loaded, replace(limits, media=given), run)
        except Exception as raised:
            if is_final(raised):
                raise
            cause = raised.__cause__ or raised
            fits = _EXCLUDING.search(str(cause)) is None
            extensions = [*_extensions(loaded, given, cause)] if fits else []
            error = without_frames(raised)
        else:
            return given
        for more in extensions:
            if more in tried or len(tried) > most_calls:
                continue
            tried.add(more)
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
            try_inputs(loaded, replace(limits, media=fewer), run)
            found = fewer
    return replace(limits, media=found)


def without_frames(error: Exception) -> Exception:
    """Drop the frames of an exception, which hold the activations of the model."""
    parts: list[BaseException | None] = [error, error.__cause__, error.__context__]
    for part in parts:
        if part is not None:
            part.__traceback__ = None
    return error


def is_final(error: Exception) -> bool:
    """Return True if the model lacks nothing: it counts the tokens of an image, or assay refuses its output."""
    is_refusal = isinstance(error, AssayError) and error.__cause__ is None
    return is_refusal or NUM_FEATURES.search(str(error.__cause__ or error)) is not None


def _extensions(
    loaded: LoadedModel, given: tuple[Media, ...], error: BaseException
) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors in another size, or with one more, as an exception asks for."""
    for more in _resized(given, str(error)) if given else ():
        if all(0 < math.prod(one.shape) <= _MOST_ELEMENTS for one in more):
            yield more
    documented = document_arguments(loaded.model.forward)
    names = {one.name for one in given}
    for name in _list_lacking(error, documented) if len(given) < _MOST_TENSORS else ():
        if name not in names:
            likely = [*likely_values(loaded, name, documented)]
            if name.endswith("mask") and given:
                yield from ((*given, one) for one in likely if one.shape == given[0].shape)
                # That of a sound may have one number for each frame.
                for length in sorted(given[0].shape[1:], reverse=True):
                    yield *given, Media(name, (1, length), numbers=(1,))
                    yield *given, Media.of_tensor(name, torch.ones(1, length, dtype=torch.bool))
            yield from ((*given, one) for one in likely)


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
_MULTIPLE = re.compile(r"multiple of (?:`[^`]*` \()?([1-9]\d*)")
_OTHER_SIDES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_OTHER_SIZE = re.compile(r"\(\d+\*\d+\) doesn't match model \((\d+)\*(\d+)\)")


def _resized(given: tuple[Media, ...], message: str) -> Iterator[tuple[Media, ...]]:
    """Yield the tensors in the size that an exception's message asks for: the last one, or all of a length."""
    *others, media = given
    shape = media.shape
    if unit := _MULTIPLE.search(message):
        for length in map(int, re.findall(r"\d+", message)):
            longer = length + -length % int(unit[1])
            yield tuple(replace(one, shape=_with_size(one.shape, length, longer)) for one in given)
    found = []
    if size := _OTHER_SIZE.search(message):
        found.append((*shape[:-2], *map(int, size.groups())))
    if (sides := _OTHER_SIDES.search(message)) and len(shape) > 3:
        for part, whole in permutations(map(int, sides.groups())):
            found.append((*shape[:-2], *(one * part // whole for one in shape[-2:])))
    for width in filter(None, (one.search(message) for one in _OTHER_WIDTHS)):
        expected, actual = int(width["expected"]), int(width["actual"])
        if media.numbers is None and actual in shape[1:]:
            found.append(_with_size(shape, actual, expected))
        elif media.numbers is None:  # the code takes some columns away
            found.append((*shape[:-1], shape[-1] + expected - actual))
    yield from ((*others, replace(media, shape=one)) for one in found)


def _with_size(shape: tuple[int, ...], size: int, other: int) -> tuple[int, ...]:
    """Return a shape with another size in place of each dim of this one, except for the first."""
    return (shape[0], *(other if one == size else one for one in shape[1:]))


class _Outputs(Protocol):
    @property
    def outputs(self) -> Mapping[str, torch.Tensor]: ...


@torch.no_grad()
def with_additions(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], _Outputs]
) -> ModelLimits:
    """Add the tensors that the model needs in addition to its other inputs, or with which it reads more of its parameters.

    A model on the meta device gets none.
    run: calls the model with a batch. Raises: what the model raises without what it needs.
    """
    model: Any = loaded.model
    if next(model.parameters()).is_meta:
        return limits
    limits = complete(loaded, limits, run)
    unread, outputs = _watch(loaded, limits, run)
    documented = document_arguments(model.forward)
    media, found_outputs = limits.media, outputs
    for name in documented:
        if not unread or name in {one.name for one in media}:
            continue
        for one in likely_values(loaded, name, documented):
            with suppress(Exception):  # code of the model
                more = replace(limits, media=(*media, one))
                found = complete(loaded, more, run, _MOST_FURTHER_CALLS)
                still_unread, names = _watch(loaded, found, run)
                if unread - still_unread:
                    unread &= still_unread
                    media, found_outputs = found.media, names
                break
    # Further outputs, such as scores of entities, have to come with every batch.
    if found_outputs == outputs:
        return replace(limits, optional=() if media == limits.media else media)
    return replace(limits, media=media)


def _watch(
    loaded: LoadedModel, limits: ModelLimits, run: Callable[[LoadedModel, Batch], _Outputs]
) -> tuple[set[str], set[str]]:
    """Return the parameters that nothing reads with the media of `limits`, and the names of the outputs."""
    watch, outputs = UsageWatch(NullHandler()), set[str]()
    watch.add_parameters_of(loaded.model)
    with watch.reading(), watch.reading_between_calls():
        try_inputs(loaded, limits, lambda *given: outputs.update(run(*given).outputs))
    return watch.unread, outputs


# In the message of a model that got another number of tokens.
NUM_FEATURES = re.compile(r"(?:features: |value tensor of shape \[)(\d+)")
