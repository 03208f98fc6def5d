"""Prompts of a shape: long enough texts, written in the format that a check reads."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from assay.errors import UsageError
from assay.files import read_json
from assay.inputs import built_in_texts

# Of the longest tokens that are common, so that a text has as many tokens as are asked for.
_CHARACTERS_A_TOKEN = 8

_HUMAN = ("human", "user")


def prompt_lines(texts: Sequence[str], num_prompts: int, length: int, first: int = 0) -> str:
    """JSON lines of `num_prompts` prompts, each of at least `length` tokens: longer ones are cut later.

    Where there are too few texts they are used again, each time beginning at another one.
    first: number of the text that the first prompt begins with.
    """
    lines = []
    for number in range(first, first + num_prompts):
        parts: list[str] = []
        while sum(map(len, parts)) < _CHARACTERS_A_TOKEN * length:
            parts.append(texts[(number + len(parts)) % len(texts)])
        lines.append(json.dumps({"text": "\n\n".join(parts)}))
    return "\n".join(lines) + "\n"


def read_texts(file: Path | None) -> Sequence[str]:
    """What people asked in a ShareGPT file: the first message of each conversation; or built-in texts.

    Raises: UsageError naming file and conversation.
    """
    if file is None:
        return built_in_texts()
    conversations = read_json(file)
    if not isinstance(conversations, list) or not conversations:
        raise UsageError(f"prompts {file}: needs a list of conversations, as ShareGPT has it")
    texts = [
        text
        for number, one in enumerate(conversations)
        for text in _asked(one, f"{file}: {number}")
    ]
    if not texts:
        raise UsageError(f"prompts {file}: no conversation begins with a person's message")
    return texts


def _asked(conversation: object, where: str) -> Iterator[str]:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise UsageError(f"{where}: a conversation is an object with a list `conversations`")
    for message in messages[:1]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise UsageError(f"{where}: a message is an object with `from` and a text `value`")
        if message.get("from") in _HUMAN and message["value"]:
            yield message["value"]
