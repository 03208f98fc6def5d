"""Prompts, limits of a model on them, and batches of their token ids that run through the model together.

Shapes: B rows, T positions.
"""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import xxhash
from pydantic import TypeAdapter

from assay.errors import UsageError
from assay.files import read_json_lines, read_json_object, read_lines
from assay.foreign_text import shorten

if TYPE_CHECKING:
    import torch


class _Model(Protocol):
    @property
    def config(self) -> object: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def can_generate(self) -> bool: ...
    @property
    def decoder_start(self) -> tuple[int, ...]: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def media_input(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Media:
    """A tensor of an image, a video or a sound: given whole numbers or values, or values made from a seed.

    Those values are bytes, as (byte - 128) / 64, exact in every dtype.
    """

    name: str
    """Argument of the model."""
    shape: tuple[int, ...]
    """The first dim counts the images or the patches."""
    seed: int = 0
    numbers: tuple[int, ...] | None = None
    """Whole numbers in place of values from the seed; one stands for all."""
    extent: tuple[int, ...] = ()
    """The part with values, before zeros of padding; empty without padding."""
    given: Any = field(default=None, compare=False, repr=False)
    """A tensor in place of values from the seed."""
    digest: str = ""
    """The hash of `given`; "" without it."""
    layout: Literal["batch", "strip", "row", "token"] = "batch"
    """First dims of the argument: all images of the batch, images by text, or tokens by text. The images of a
    "strip" lie side by side along its last dim."""

    @classmethod
    def of_tensor(cls, name: str, tensor: "torch.Tensor", layout: Any = "batch") -> Self:  # noqa: ANN401 - a literal
        """Return the media with the values of a tensor."""
        content = tensor.contiguous().numpy().tobytes()
        digest = xxhash.xxh3_128_hexdigest(content)
        return cls(name, tuple(tensor.shape), given=tensor, digest=digest, layout=layout)

    @property
    def values(self) -> "torch.Tensor":
        """Return the given values, or those in float32 from -2 to 2."""
        import torch

        if self.given is not None:
            given: torch.Tensor = self.given
            return given
        shape = self.extent or self.shape
        if self.numbers is None:
            drawn = random.Random(self.seed).randbytes(math.prod(shape))  # noqa: S311 - reproducible
            levels = torch.frombuffer(bytearray(drawn), dtype=torch.uint8).float()
            values = ((levels - 128) / 64).reshape(shape)
        elif len(self.numbers) == 1:
            values = torch.full(shape, self.numbers[0])
        else:
            values = torch.tensor(self.numbers, dtype=torch.long).reshape(shape)
        return _pad_to(values, self.shape)


@dataclass(frozen=True, slots=True)
class InsertedMedia:
    """The tensors of one image or sound in a text, and the tokens that it takes there."""

    tensors: tuple[Media, ...]
    ids: tuple[int, ...]
    """Placeholders, with the tokens that begin and end an image."""
    marks: tuple[int, ...] = ()
    """Values of `marked_in` for `ids`; empty for 1 at placeholders and 0 elsewhere."""


def join_media(
    rows: Sequence[Sequence[Media]], starts: Sequence[int] = (), length: int = 0
) -> "dict[str, torch.Tensor]":
    """Return the tensors of a batch by argument, from the media of each of its rows.

    Smaller images are padded with zeros, and so are rows with fewer images or tokens.
    starts: the column of the first token of each row.
    length: tokens of each row with padding.
    """
    import torch

    found: dict[str, list[list[torch.Tensor]]] = {}
    layouts: dict[str, str] = {}
    for number, row in enumerate(rows):
        for one in row:
            found.setdefault(one.name, [[] for _ in rows])[number].append(one.values)
            layouts[one.name] = one.layout
    joined = {}
    for name, of_rows in found.items():
        parts = [part for row in of_rows for part in row]
        if layouts[name] == "strip":
            joined[name] = torch.cat(parts, -1)
            continue
        size = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        padded = [[_pad_to(part, [len(part), *size]) for part in row] for row in of_rows]
        if layouts[name] == "batch":
            joined[name] = torch.cat([part for row in padded for part in row])
            continue
        whole = [torch.cat([parts[0].new_zeros(0, *size), *row]) for row in padded]
        of_tokens = layouts[name] == "token"
        most = length if of_tokens else max(map(len, whole))
        joined[name] = parts[0].new_zeros(len(rows), most, *size)
        for number, values in enumerate(whole):
            start = starts[number] if of_tokens else 0
            joined[name][number, start : start + len(values)] = values
    return joined


def _pad_to(tensor: "torch.Tensor", shape: Sequence[int]) -> "torch.Tensor":
    """Return a tensor of this shape, with zeros behind the values."""
    padded = tensor.new_zeros(tuple(shape))
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The properties of a model that limit its inputs."""

    vocab_size: int
    max_positions: int | None = None
    """Length of the longest sequence; None without a limit."""
    sliding_window: int | None = None
    """Length of the shortest window of a layer; None without windows."""
    pad_token_id: int = 0
    can_generate: bool = True
    only_forward: str = ""
    """Why one call is made of a model whose own `generate` returns no logits; "" for other models."""
    decoder_start: tuple[int, ...] = ()
    """First ids of a decoder that reads the prompt through an encoder."""
    media: tuple[Media, ...] = ()
    """The image or sound of each row, with its mask; empty for a model of text."""
    optional: tuple[Media, ...] = ()
    """Tensors of each row in every second batch, in place of `media`: a part of the model runs only with them."""
    images: tuple[InsertedMedia, ...] = ()
    """Images or sounds of several sizes that a text may hold; empty for other models."""
    needs_image: bool = False
    """True if every batch needs an image."""
    placeholders: tuple[int, ...] = ()
    """The token that an image replaces."""
    marked_in: tuple[str, ...] = ()
    """Arguments that are 1 for the placeholders and 0 for other tokens."""
    seen_in: str = ""
    """The argument for the images that each token attends to, (B, T, images, tiles); "" without one."""
    no_media: str = ""
    """Why the texts of a model that reads images or sounds hold none; "" for other models."""
    has_tokens: bool = True
    """False for a model of images or sounds alone."""
    end_token_id: int | None = None
    """Last token of every text, where a model may take its state for the text's; None for any."""
    reads_padding: bool = False
    """True if padding before a text changes its results, so that each text is a batch of its own."""
    whole_prefill: str = ""
    """Why the prefill cannot be divided into chunks; "" if it can."""

    def check_ids(self, ids: Sequence[int], max_new_tokens: int, where: str) -> None:
        """Raise UsageError, starting with `where`, if the model cannot continue `ids`."""
        if not ids:
            raise UsageError(f"{where}: the prompt is empty")
        for position, id_ in enumerate(ids):
            if not 0 <= id_ < self.vocab_size and id_ not in self.placeholders:
                raise UsageError(
                    f"{where}: token id {shorten(id_)} at position {position} is outside the"
                    f" vocabulary of {self.vocab_size}"
                )
        if self.max_positions is not None and len(ids) + max_new_tokens > self.max_positions:
            raise UsageError(
                f"{where}: {len(ids)} tokens and {max_new_tokens} new ones are over the model's"
                f" context of {self.max_positions}"
            )


def limits_of(model: _Model) -> ModelLimits:
    """Return the limits of a loaded model."""
    # An encoder-decoder that classifies takes the state of the last token of the text.
    classifies = getattr(model.config, "is_encoder_decoder", False) and not model.decoder_start
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        sliding_window=_sliding_window(model.config),
        pad_token_id=model.pad_token_id,
        can_generate=model.can_generate,
        decoder_start=model.decoder_start,
        end_token_id=next(iter(model.eos_token_ids), None) if classifies else None,
    )


def _sliding_window(config: Any) -> int | None:  # noqa: ANN401 - of any model
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    windows = (getattr(one, "sliding_window", None) for one in layers)
    window = min((one for one in windows if one is not None), default=None)
    layer_types = getattr(config, "layer_types", None)
    has_windows = layer_types is None or "sliding_attention" in layer_types
    if window is None or not has_windows or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)


Encode = Callable[[str], list[int]]
EncodeChat = Callable[[Sequence[Mapping[str, str]]], list[int]]

_BUILT_IN = Path(__file__).parent / "prompts.jsonl"
_KEYS = ("prompt", "text", "ids", "messages")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    text: str | None
    """The whole encoded text, even if the ids were cut."""
    ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    """The tensors of its images."""


@cache
def built_in_texts() -> tuple[str, ...]:
    """Read the built-in prompts: prose, code, other languages and scripts, digits, emoji."""
    return tuple(line["text"] for _, line in read_json_lines(_BUILT_IN))


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file before encoding."""

    where: str
    kind: str
    """Its key, one of `_KEYS`."""
    value: Any
    images: tuple[Path, ...] = ()
    """Files of images in the text."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the messages of a chat that it is; a text is one of the user. [] for token ids."""
        if self.kind == "ids":
            return []
        chat: list[dict[str, str]] = self.value
        return chat if self.kind == "messages" else [{"role": "user", "content": self.value}]


def is_expectation(path: Path) -> bool:
    """Return True for one JSON object in several lines, as in an expectation, and False for JSON Lines."""
    return next(read_lines(path), (0, ""))[1].strip() == "{"


def read_prompts(path: Path) -> list[PromptLine]:
    """Read the lines of a JSONL file, each an object with one of the keys `_KEYS`.

    `prompt` and `text` hold strings, `ids` token ids, `messages` a chat. A string may have `images`, a list of
    files, named from the folder of the prompts file. An expectation stands for the token ids that it recorded.
    Raises: UsageError, naming file and line.
    """
    if is_expectation(path):
        record = read_json_object(path)
        recorded = record.get("prompts") or record.get("inputs")
        if not isinstance(recorded, list):
            raise UsageError(f"{path}: needs one prompt a line, or an expectation with token ids")
        return [
            _read_line({"ids": ids}, f"{path}, prompt {number}", path.parent)
            for number, ids in enumerate(recorded)
        ]
    found = [
        _read_line(line, f"{path}, line {number}", path.parent)
        for number, line in read_json_lines(path)
    ]
    if not found:
        raise UsageError(f"prompts {path}: the file is empty")
    return found


def load_prompts(
    path: Path,
    encode: Encode,
    limits: ModelLimits,
    *,
    max_new_tokens: int,
    encode_chat: EncodeChat | None = None,
    encode_images: Callable[[PromptLine], Prompt] | None = None,
) -> list[Prompt]:
    """Read the prompts of a file in the format of `read_prompts`, and encode them.

    encode_chat: encode every text as a user's message with the chat template.
    encode_images: encode a text with images; None for a model that cannot.
    Raises: UsageError, naming file and line.
    """
    prompts = []
    for line in read_prompts(path):
        if line.images and encode_images is None:
            raise UsageError(f"{line.where}: images need a model with a processor that reads them")
        if line.images and encode_images is not None:
            prompt = encode_images(line)
        else:
            prompt = _encode_line(line, encode, encode_chat)
        limits.check_ids(prompt.ids, max_new_tokens, line.where)
        prompts.append(prompt)
    return prompts


def _read_line(record: Mapping[str, Any], where: str, folder: Path) -> PromptLine:
    keys = [key for key in _KEYS if key in record]
    if len(keys) != 1:
        raise UsageError(f"{where}: needs an object with one of the keys {', '.join(_KEYS)}")
    kind, value = keys[0], record[keys[0]]
    if record.get("images") and kind in ("ids", "messages"):
        raise UsageError(f"{where}: images go with text, not with {kind}")
    if kind == "ids":
        return PromptLine(where, kind, _as_ids(value, where))
    if kind == "messages":
        return PromptLine(where, kind, _as_messages(value, where))
    if not isinstance(value, str):
        raise UsageError(f"{where}: {kind} must be a string, not {type(value).__name__}")
    images = record.get("images", [])
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise UsageError(f"{where}: images must be a list of files")
    if not value and not images:
        raise UsageError(f"{where}: the prompt is empty")
    files = tuple(folder / one for one in images)
    if absent := [one for one in files if not one.is_file()]:
        raise UsageError(f"{where}: images: {absent[0]} does not exist")
    return PromptLine(where, kind, value, files)


def _encode_line(line: PromptLine, encode: Encode, encode_chat: EncodeChat | None) -> Prompt:
    if line.kind == "ids":
        return Prompt(None, line.value)
    if encode_chat is not None:
        return Prompt(line.messages[-1]["content"], tuple(encode_chat(line.messages)))
    if line.kind == "messages":
        raise UsageError(f"{line.where}: messages need --chat and a model with a chat template")
    return Prompt(line.value, tuple(encode(line.value)))


def _as_ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(id_) is int for id_ in value):
        raise UsageError(f"{where}: ids must be a list of whole numbers")
    return tuple(value)


def _as_messages(value: object, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: messages must be a list of at least one message")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UsageError(f"{where}: each message needs a role and a content, both strings")
    return value


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that the model continues together.

    They are padded on the left as generation needs it, or on the right if an encoder reads them, alone or next to
    images.
    """

    number: int
    rows: tuple[tuple[int, ...], ...]
    """Token ids of each prompt, without padding."""
    prompts: tuple[int, ...]
    """The number of each row's prompt in the plan."""
    pad_token_id: int
    max_new_tokens: int
    """0 for a model that cannot generate."""
    prefill_chunk: int | None = None
    """`prefill_chunk_size` of the generation; None for a prefill in one call."""
    padded_to: int = 0
    """Least length of each row, to keep the padding of another batch."""
    media: tuple[tuple[Media, ...], ...] = ()
    """The images or sounds of each row. A model that takes no token ids has empty rows."""
    decoder_start: tuple[int, ...] = ()
    """First ids of the decoder of an encoder-decoder; empty for other models.

    The positions of its tokens follow those of the encoder: the first one has the length of the prompt."""

    @property
    def length(self) -> int:
        """Count the tokens of each row including padding, T."""
        return max(self.padded_to, *(len(row) for row in self.rows))

    def select_row(self, row: int) -> "Batch":
        """Return the row alone, without padding."""
        own = slice(row, row + 1)
        rows, prompts, media = self.rows[own], self.prompts[own], self.media[own]
        return replace(self, rows=rows, prompts=prompts, media=media, padded_to=0)

    @property
    def holds_media(self) -> bool:
        """Return True if a text holds an image or a sound."""
        return self.length > 0 and any(one.layout != "token" for row in self.media for one in row)

    @property
    def input_ids(self) -> "torch.Tensor":
        """Return token ids (B, T) in int64."""
        import torch

        rows = [self._pad(row, self.pad_token_id) for row in self.rows]
        return torch.tensor(rows, dtype=torch.long)

    @property
    def attention_mask(self) -> "torch.Tensor":
        """Return 1 for a token and 0 for padding (B, T), int64."""
        import torch

        rows = [self._pad([1] * len(row), 0) for row in self.rows]
        return torch.tensor(rows, dtype=torch.long)

    @property
    def inputs(self) -> "dict[str, torch.Tensor]":
        """Return the tensors that the model's encoder gets, or the model itself, by argument."""
        found: dict[str, torch.Tensor] = {}
        if self.length:
            found = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        starts = [self._start_of(row) for row in self.rows]
        return found | join_media(self.media, starts, self.length)

    @property
    def decoder_input_ids(self) -> "torch.Tensor | None":
        """Return the first ids of the decoder, (B, S) in int64; None without an encoder."""
        import torch

        return torch.tensor([self.decoder_start] * len(self.rows)) if self.decoder_start else None

    def first_new_position(self, row: int) -> int:
        """Return the position of the first new token of a row."""
        return len(self.rows[row]) + len(self.decoder_start)

    def _pad(self, row: Sequence[int], value: int) -> list[int]:
        start = self._start_of(row)
        return [value] * start + [*row] + [value] * (self.length - len(row) - start)

    def _start_of(self, row: Sequence[int]) -> int:
        """Return the column of a row's first token."""
        is_encoded = self.decoder_start or (self.media and not self.max_new_tokens)
        return 0 if is_encoded else self.length - len(row)


@dataclass(frozen=True, slots=True)
class InputPlan:
    """All inputs of a check."""

    batches: tuple[Batch, ...]
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """Sentences about options and usual inputs that the model does not allow."""

    @property
    def generates(self) -> bool:
        """Return True if the model generates tokens."""
        return any(batch.max_new_tokens for batch in self.batches)

    @property
    def content_hash(self) -> str:
        """Hash all inputs of the model, but no texts and notes, with XXH3-128."""
        # A golden that was captured before batches had a decoder keeps its hash.
        known = self.to_json()["batches"]
        parts = [{name: part for name, part in one.items() if part != ()} for one in known]
        record = json.dumps(parts, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(record.encode())

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values for `from_json`, without `tensors`."""
        return asdict(_map_media(self, lambda one: replace(one, given=None)))

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return the given tensors of all media, by digest."""
        return {
            one.digest: one.given
            for batch in self.batches
            for row in batch.media
            for one in row
            if one.digest
        }

    @classmethod
    def from_json(
        cls, record: Mapping[str, Any], tensors: "Mapping[str, torch.Tensor] | None" = None
    ) -> "InputPlan":
        """Make the plan from the result of `to_json`, and its `tensors`."""
        plan = TypeAdapter(cls).validate_python(record)
        return _map_media(plan, lambda one: replace(one, given=(tensors or {}).get(one.digest)))


def _map_media(plan: InputPlan, change: Callable[[Media], Media]) -> InputPlan:
    batches = (
        replace(batch, media=tuple(tuple(map(change, row)) for row in batch.media))
        for batch in plan.batches
    )
    return replace(plan, batches=tuple(batches))
