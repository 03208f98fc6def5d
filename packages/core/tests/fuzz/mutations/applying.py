"""One mutation of one file of a sample, chosen by what the file holds."""

import random
from collections.abc import Callable
from pathlib import Path

from packages.core.tests.fuzz.mutations.binary_files import (
    mutate_bytes,
    mutate_database,
    mutate_safetensors,
    parses_as_json,
    write_large_json,
    write_pickle,
)
from packages.core.tests.fuzz.mutations.file_nodes import replace_by_node
from packages.core.tests.fuzz.mutations.json_text import mutate_json, mutate_json_lines
from packages.core.tests.fuzz.mutations.lined_text import mutate_text, mutate_toml, mutate_yaml

_Text = Callable[[str, random.Random], tuple[str, str]]

_OF_TEXT: dict[str, _Text] = {
    ".json": mutate_json,
    ".jsonl": mutate_json_lines,
    ".toml": mutate_toml,
    ".yaml": mutate_yaml,
    ".yml": mutate_yaml,
}
_OF_FILE: dict[str, Callable[[Path, random.Random], str]] = {
    ".db": mutate_database,
    ".bin": write_pickle,
}

_SHARE_OF_NODES = 0.08
_SHARE_OF_BYTES = 0.2
_SHARE_OF_LARGE = 0.003


def mutate_file(file: Path, rng: random.Random) -> str:
    """Change `file`. Returns: what was done."""
    chance = rng.random()
    if chance < _SHARE_OF_LARGE and file.suffix == ".json":
        return write_large_json(file, rng)
    if chance < _SHARE_OF_NODES:
        return replace_by_node(file, rng)
    data = file.read_bytes()
    if chance < _SHARE_OF_BYTES:
        data, told = mutate_bytes(data, rng)
    elif file.suffix == ".safetensors":
        data, told = mutate_safetensors(data, rng)
    elif file.suffix in _OF_FILE:
        return _OF_FILE[file.suffix](file, rng)
    else:
        mutate = _OF_TEXT.get(file.suffix, mutate_text)
        if mutate is mutate_json and not parses_as_json(data):
            mutate = mutate_text
        text, told = mutate(data.decode(), rng)
        data = text.encode("utf-8", "surrogatepass")
    file.write_bytes(data)
    return told
