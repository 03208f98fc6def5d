"""Chats to render, the shortest first. No turn's text is part of another's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay_smoke.data.protocols import Message
from assay_smoke.data.tokens.chat_templates import generation_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def conversations(tokenizer: "PreTrainedTokenizerBase") -> Iterator[Conversation]:
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
