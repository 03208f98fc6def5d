"""Mutations of TOML, YAML and plain text, line by line."""

import random
import re
from collections.abc import Callable

from packages.core.tests.fuzz.mutations.hostile_values import (
    TEXTS,
    alias_bomb,
    hostile_toml,
    hostile_yaml,
)

_TOML_VALUE = re.compile(r"^(\s*[\w.\"'-]+\s*=\s*)\S.*$")
_YAML_VALUE = re.compile(r"^(\s*(?:- )?[\w.\"'-]+:\s*)\S.*$")


def mutate_toml(text: str, rng: random.Random) -> tuple[str, str]:
    """Change a value, a key or a line of TOML."""
    if rng.random() < 0.05:
        name = rng.choice(("a." * 3_000, "a." * 300_000))
        return (
            f"{text}\n{rng.choice(('', '['))}{name}a{rng.choice((' = 1', ']', ''))}\n",
            "a long key",
        )
    return _mutate_lines(text, _TOML_VALUE, hostile_toml, rng)


def mutate_yaml(text: str, rng: random.Random) -> tuple[str, str]:
    """Change a value, a key or a line of YAML."""
    chance = rng.random()
    if chance < 0.05:
        return text + alias_bomb(), "aliases of aliases"
    if chance < 0.1:
        deep = rng.choice(("[" * 100_000, "- " * 20_000 + "a", "{a: " * 400 + "1" + "}" * 400))
        return f"{text}deep: {deep}\n", "deep nesting"
    return _mutate_lines(text, _YAML_VALUE, hostile_yaml, rng)


def mutate_text(text: str, rng: random.Random) -> tuple[str, str]:
    """Insert a hostile text into plain text."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(TEXTS) + text[at:], f"a hostile text at {at}"


def _mutate_lines(
    text: str, value: re.Pattern[str], hostile: Callable[[random.Random], str], rng: random.Random
) -> tuple[str, str]:
    lines = text.split("\n")
    settings = [number for number, line in enumerate(lines) if value.match(line)]
    number = rng.choice(settings) if settings and rng.random() < 0.8 else rng.randrange(len(lines))
    line = lines[number]
    found = value.match(line)
    chance = rng.random()
    if found and chance < 0.6:
        told = "replace the value"
        lines[number] = found[1] + hostile(rng)
    elif chance < 0.7:
        told = "remove the line"
        del lines[number]
    elif chance < 0.8:
        told = "repeat the line"
        lines.insert(rng.randrange(len(lines)), line)
    elif chance < 0.9:
        told = "change a character"
        at = rng.randrange(len(line) + 1)
        lines[number] = line[:at] + rng.choice("[]{}\"'=:.#&*!\\\t0a") + line[at + 1 :]
    else:
        told = "cut the file"
        del lines[number:]
    return "\n".join(lines), f"line {number + 1}: {told}"
