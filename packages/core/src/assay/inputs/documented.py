"""Make the tensors of a model's arguments from the shapes that the documentation of its forward call names."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from assay.inputs.batches import Media

Read = Callable[..., Any]
"""Return the first value of a configuration under these keys that is not None."""

# `input_boxes (`torch.Tensor` of shape `(batch_size, num_boxes, 4)`)`, as transformers documents an argument.
# Some have other quotes, or brackets, and boxes "for each token".
_DOCUMENTED = re.compile(
    r"^ *(\w+) \([`']*(?:torch\.)?(\w*)[`']*\s+of shape\s+[`'][([]([^`'\n]*(?:\)` or `\([^`'\n]*)*)[])][`']"
    r"(?:.*\n.*(each token))?",
    re.MULTILINE,
)
_OR = ")` or `("
_STATES_OR_VECTOR = f"batch_size, sequence_length, hidden_size{_OR}batch_size, hidden_size"
# Given in another way, or without effect on a module that is not called.
_EXCLUDED = re.compile(
    r"(decoder_)?(inputs_embeds|attention_mask|position_ids)|input_ids|labels|.*_labels_?ids"
    r"|encoder_outputs|past_key_values|.*head_mask"
)
_OF_TEXT = re.compile(r"(input_ids|sequence|seq)_?len(gth)?|seqlen")
# An encoder's output, images and sounds: their sequence length is not the number of tokens.
_OF_OWN_LENGTH = re.compile(r"encoder_|pixel_|input_(features|values)")
_FEW = 4
# Settings with the size of a dim, where its documented name is not the setting's.
_SETTINGS = {
    "dim": ("hidden_size",),
    "hidden_size": ("cross_attention_hidden_size", "encoder_hidden_size", "d_model", "hidden_size"),
    "sequence_length": ("context_length",),
    "num_features": ("num_time_features",),
}


def document_arguments(forward: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Return the kind of tensor and the dims, as text, of each argument that a caller may have to give.

    Both are "" for a mask without documentation. A required argument without it may be states or a vector.
    """
    parameters = inspect.signature(forward).parameters.values()
    required = {
        one.name
        for one in parameters
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    }
    known = [one.name for one in parameters if not _EXCLUDED.fullmatch(one.name)]
    text = (forward.__doc__ or "").replace("{0}", "batch_size, sequence_length")
    found = {
        name: (kind, dims.replace("num_boxes", "sequence_length") if per_token else dims)
        for name, kind, dims, per_token in _DOCUMENTED.findall(text)
    }
    found |= dict.fromkeys(required - found.keys(), ("", _STATES_OR_VECTOR))
    return {one: found.get(one, ("", "")) for one in known if one in found or one.endswith("mask")}


def likely_tensors(
    name: str, documented: Mapping[str, tuple[str, str]], read: Read, *, of_tokens: bool
) -> Iterator[Media]:
    """Yield tensors of one row for a documented argument, the likeliest first.

    of_tokens: the model reads token ids, so that a sequence has the length of the text.
    """
    kind, forms = documented[name]
    if _OR in forms:
        for form in forms.split(_OR):
            yield from likely_tensors(name, {name: (kind, form)}, read, of_tokens=of_tokens)
    elif forms:
        yield from _in_form(name, kind, forms, read, of_tokens=of_tokens)


def _in_form(name: str, kind: str, dims: str, read: Read, *, of_tokens: bool) -> Iterator[Media]:
    _, *symbols = [one.strip() for one in dims.rstrip(", ").split(",")]
    is_own = not symbols or _OF_OWN_LENGTH.match(name)
    in_text = of_tokens and not is_own and _OF_TEXT.fullmatch(symbols[0])
    sizes = [[*dict.fromkeys(_sizes_of(one, read, number))] for number, one in enumerate(symbols)]
    shapes = [*product(*sizes)]
    for shape in shapes:
        whole = Media(name, (1, *shape))
        if in_text:
            yield from _with_values(replace(whole, shape=(1, *shape[1:]), layout="token"), kind)
        yield from _with_values(whole, kind)
    for shape in shapes:
        yield from _with_values(Media(name, (1, 1, *shape)), kind)


def _sizes_of(symbol: str, read: Read, number: int) -> Iterator[int]:
    """Yield likely sizes of a dim. number: its place among those of a row."""
    key = symbol.removeprefix("config.")
    if symbol.isdecimal():
        yield int(symbol)
        return
    if symbol in ("image_size", "height", "width"):
        size = read("image_size", "input_size", "img_size") or 64
        yield size if isinstance(size, int) else size[number - 1]
        return
    found = [one for one in map(read, _SETTINGS.get(symbol, (key,))) if type(one) is int]
    if symbol == "sequence_length":  # of a time series
        found = [one + max(read("lags_sequence") or [0]) for one in found]
    several = (_FEW, 1) if symbol.startswith("num_") else (_FEW,)  # such as boxes of one image
    yield from found or ((3,) if symbol == "num_channels" else several)


def _with_values(media: Media, kind: str) -> Iterator[Media]:
    """Yield the tensor with values of the documented kind, and of others if the kind leaves it open."""
    name, size = media.name, math.prod(media.shape)
    is_mask = "mask" in name
    if media.layout == "token":  # the numbers of the first tokens; the others get 0
        whole = replace(media, numbers=(1,))
    elif kind == "BoolTensor":
        import torch

        yield Media.of_tensor(name, torch.ones(media.shape, dtype=torch.bool))
        return
    elif is_mask:
        whole = replace(media, numbers=(1,))
    else:
        ids = name.endswith("input_ids")
        whole = replace(media, numbers=tuple(n + 1 if ids else 1 - n % 2 for n in range(size)))
    is_whole = kind in ("LongTensor", "IntTensor") or name.endswith("_ids")
    yield from (whole, media) if is_whole or is_mask else (media, whole)
