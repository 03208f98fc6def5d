"""Prompts of a shape, in the format of `--prompts`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from assay.errors import UsageError
from assay.files import read_json
from assay.inputs import built_in_texts

# Longer than common tokens, so that texts have enough tokens.
_CHARACTERS_A_TOKEN = 8

_HUMAN = ("human", "user")


def prompt_lines(texts: Sequence[str], num_prompts: int, length: int, first: int = 0) -> str:
    """Format prompts of at least `length` tokens as JSON lines. The check shortens them.

    Each prompt joins texts from another start, so texts can repeat.
    first: index of the first prompt's first text.
    """
    lines = []
    for number in range(first, first + num_prompts):
        parts: list[str] = []
        while sum(map(len, parts)) < _CHARACTERS_A_TOKEN * length:
            parts.append(texts[(number + len(parts)) % len(texts)])
        lines.append(json.dumps({"text": "\n\n".join(parts)}))
    return "\n".join(lines) + "\n"


def read_texts(file: Path | None) -> Sequence[str]:
    """Read the first message of each conversation in a ShareGPT file, or return the built-in texts.

    Raises: UsageError that names file and conversation.
    """
    if file is None:
        return built_in_texts()
    conversations = read_json(file)
    if not isinstance(conversations, list) or not conversations:
        raise UsageError(f"prompts {file}: expected a list of conversations in the ShareGPT format")
    texts = [
        text
        for number, one in enumerate(conversations)
        for text in _asked(one, f"{file}: {number}")
    ]
    if not texts:
        raise UsageError(f"prompts {file}: no conversation begins with a human message")
    return texts


def _asked(conversation: object, where: str) -> Iterator[str]:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise UsageError(f"{where}: expected an object with a list `conversations`")
    for message in messages[:1]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise UsageError(f"{where}: expected messages with `from` and a text `value`")
        if message.get("from") in _HUMAN and message["value"]:
            yield message["value"]
