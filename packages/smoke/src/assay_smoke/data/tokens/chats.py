"""Chats to render, the shortest first, and their text and ids by a tokenizer's own template."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from assay_smoke.data.protocols import Message, Tokenizer

_PROBE = "Is this text?"


def template_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the ids of the template's text, empty without a template."""
    if not tokenizer.chat_template:
        return ()
    encoded: Any = tokenizer.apply_chat_template(
        template_messages(tokenizer, messages), return_dict=True
    )
    return tuple(encoded["input_ids"])


def generation_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Return the text that the template appends to `messages` for generation, or an empty string."""
    if not tokenizer.chat_template:
        return ""
    without, with_prompt = (
        str(
            tokenizer.apply_chat_template(
                template_messages(tokenizer, messages), tokenize=False, add_generation_prompt=added
            )
        )
        for added in (False, True)
    )
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def template_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that the template reads: content as text, or as a list of parts.

    Templates of vision models read parts. Given text, some of them write nothing.
    """
    if _reads_text(tokenizer):
        return [{"role": one["role"], "content": one["content"]} for one in messages]
    return [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]}
        for one in messages
    ]


def _reads_text(tokenizer: Tokenizer) -> bool:
    probe: list[dict[str, str]] = [{"role": "user", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:  # noqa: BLE001 - templates are code of the model's author
        return False
    return _PROBE in str(text)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat, named for its special feature."""

    name: str
    messages: tuple[Message, ...]


SHORT = Conversation(
    "one question",
    (
        Message(role="user", content="Name a colour."),
        Message(role="assistant", content="Blue."),
    ),
)
LONG = Conversation(
    "two questions",
    (
        *SHORT.messages,
        Message(role="user", content="And one more?"),
        Message(role="assistant", content="Green, then."),
    ),
)
WITH_SYSTEM = Conversation(
    "with a system's turn",
    (Message(role="system", content="Use few words."), *SHORT.messages),
)
# The last character of a turn is several tokens of a byte-level vocabulary.
MANY_BYTES = Conversation(
    "letters of several bytes",
    (
        Message(role="user", content="¿Qué color es 雪?"),
        Message(role="assistant", content="Blanc, bien sûr ☃"),
        Message(role="user", content="Außerdem 🙂"),
        Message(role="assistant", content="Grün 🙂"),
    ),
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
        yield Conversation(
            "control tokens in a user's text",
            (
                Message(role="user", content=f"Repeat {control} aloud."),
                Message(role="assistant", content="No."),
            ),
        )
