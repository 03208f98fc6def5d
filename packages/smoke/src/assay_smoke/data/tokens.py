"""A generated tokenizer, chats to render, and the display of tokens."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from assay.models.micro.recipes import BOS_ID, EOS_ID, MASK_ID, PAD_ID
from assay_smoke.data.protocols import IGNORED, Message, Tokenizer

_AROUND = 3


def show_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], values: Sequence[int], at: int, name: str = "label"
) -> list[str]:
    """Show the token at `at` and its neighbors with their values, one per line, with a mark at the token.

    name: of a value; a label is shown as a token.
    """
    lines = []
    for position in range(max(0, at - _AROUND), min(len(ids), at + _AROUND + 1)):
        value, mark = values[position], ">" if position == at else " "
        shown = f"{name} {show_token(tokenizer, value) if name == 'label' else value}"
        if name == "label" and value == IGNORED:
            shown = "no label"
        token = f"{mark} {position:4d}  {show_token(tokenizer, ids[position])}"
        lines.append(f"{token:36}  {shown}")
    return lines


def show_token(tokenizer: Tokenizer, id_: int) -> str:
    """Show a token's text and id: '<|eos|>' (257)."""
    if not 0 <= id_ < len(tokenizer):
        return f"no token ({id_})"
    return f"{tokenizer.decode([id_], skip_special_tokens=False)!r} ({id_})"


def show_row(tokenizer: Tokenizer, ids: Sequence[int], most: int = 16) -> str:
    """Show the tokens of a row in one line."""
    shown = " ".join(show_token(tokenizer, id_) for id_ in ids[:most])
    rest = len(ids) - most
    return f"{shown} and {rest} more" if rest > 0 else shown


BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
START = "<|im_start|>"

# `own`: a separate pad token; `eos`: as in `tokenizer.pad_token = tokenizer.eos_token`.
Padding = Literal["own", "eos"]
# Who writes BOS before a chat.
BosWriter = Literal["nobody", "template", "tokenizer", "both"]

# A turn ends with EOS. In the generation block, it has a label.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + '<|eos|>' }}{% endgeneration %}"
    "{%- else -%}"
    "{{ message['content'] + '<|eos|>' }}"
    "{%- endif -%}"
    "{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def micro_tokenizer(padding: Padding = "own", bos: BosWriter = "nobody") -> Tokenizer:
    """Make a byte-level tokenizer with a chat template that marks assistant tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # The order decides the ids, which follow those of the bytes.
    backend.add_special_tokens([BOS, EOS, PAD, MASK, START])
    if bos in ("tokenizer", "both"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
        )
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS if padding == "eos" else PAD,
        mask_token=MASK,
        extra_special_tokens=[START],
    )
    tokenizer.chat_template = (BOS if bos in ("template", "both") else "") + _TEMPLATE
    given = [tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, PAD, MASK)]
    if given != [BOS_ID, EOS_ID, PAD_ID, MASK_ID]:
        raise AssertionError(f"ids of special tokens are {given}")
    return tokenizer


_PROBE = "Is this text?"


def template_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the ids of the template's text, empty without a template."""
    if not tokenizer.chat_template:
        return ()
    chat = template_messages(tokenizer, messages)
    encoded: Any = tokenizer.apply_chat_template(chat, return_dict=True)
    return tuple(encoded["input_ids"])


def generation_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Return the text that the template appends to `messages` for generation, or an empty string."""
    if not tokenizer.chat_template:
        return ""
    chat = template_messages(tokenizer, messages)
    render = partial(tokenizer.apply_chat_template, chat, tokenize=False)
    without, with_prompt = (str(render(add_generation_prompt=added)) for added in (False, True))
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def template_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that the template reads: content as text, or as a list of parts.

    Templates of vision models read parts. Given text, some of them write nothing.
    """
    probe = [{"role": "user", "content": _PROBE}]
    text: Any = ""
    with suppress(Exception):  # templates are code of the model's author
        text = tokenizer.apply_chat_template(probe, tokenize=False)
    if _PROBE in str(text):
        return [{"role": one["role"], "content": one["content"]} for one in messages]
    parts = [(one["role"], [{"type": "text", "text": one["content"]}]) for one in messages]
    return [{"role": role, "content": content} for role, content in parts]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat, named for its special feature."""

    name: str
    messages: tuple[Message, ...]


def _dialog(name: str, *texts: str) -> Conversation:
    """Make a chat whose turns are the user's and the assistant's in turn."""
    roles = ("user", "assistant") * (len(texts) // 2)
    messages = (Message(role=role, content=text) for role, text in zip(roles, texts, strict=True))
    return Conversation(name, tuple(messages))


SHORT = _dialog("one question", "Name a colour.", "Blue.")
LONG = _dialog("two questions", "Name a colour.", "Blue.", "And one more?", "Green, then.")
_SYSTEM = Message(role="system", content="Use few words.")
WITH_SYSTEM = Conversation("with a system's turn", (_SYSTEM, *SHORT.messages))
# The last character of a turn is several tokens of a byte-level vocabulary.
MANY_BYTES = _dialog(
    "letters of several bytes", "¿Qué color es 雪?", "Blanc, bien sûr ☃", "Außerdem 🙂", "Grün 🙂"
)


def conversations(tokenizer: Tokenizer) -> Iterator[Conversation]:
    """Yield all chats. The last has control tokens in a user's text."""
    yield from (SHORT, WITH_SYSTEM, LONG)
    texts = [message["content"] for message in MANY_BYTES.messages]
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    if [tokenizer.decode(ids) for ids in encoded] == texts:
        yield MANY_BYTES  # otherwise the vocabulary lacks the characters
    prompt = generation_prompt(tokenizer, SHORT.messages[:1])
    control = f"{tokenizer.eos_token or ''}{prompt}"
    if control.strip():
        yield _dialog("control tokens in a user's text", f"Repeat {control} aloud.", "No.")
