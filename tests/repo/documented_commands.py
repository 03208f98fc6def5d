"""The commands in the shell blocks of documents."""

import re
import shlex
from collections.abc import Iterator


def shell_commands(document: str) -> Iterator[list[str]]:
    """The words of every command in the shell blocks of a Markdown text."""
    for block in re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", document, re.MULTILINE | re.DOTALL
    ):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            yield from split_list(words)


def split_list(words: list[str]) -> Iterator[list[str]]:
    """The single commands of `a && b`."""
    while "&&" in words:
        yield words[: words.index("&&")]
        words = words[words.index("&&") + 1 :]
    if words:
        yield words
