"""Mutations of JSON and JSON Lines: of values where they are, and of lines."""

import json
import random
from collections.abc import Callable
from typing import Any

from packages.core.tests.fuzz.mutations.hostile_values import RAW_JSON, hostile_value

_PLACEHOLDER = "raw JSON stands here"
_DESCEND = 0.75
_MANY = 2_000


def mutate_json(text: str, rng: random.Random) -> tuple[str, str]:
    """Change one value of a JSON document. Returns: the document, and what was done."""
    document = json.loads(text)
    holder: list[Any] = [document]
    parent, key, place = _choose_place(holder, rng)
    operation = rng.choice(_OPERATIONS)
    raw = operation(parent, key, rng)
    changed = json.dumps(holder[0] if holder else None)
    if raw is not None:
        changed = changed.replace(json.dumps(_PLACEHOLDER), raw, 1)
    return changed, f"{operation.__name__.strip('_')} at {place or 'the top'}"


def mutate_json_lines(text: str, rng: random.Random) -> tuple[str, str]:
    """Change a value in one line, or the lines."""
    lines = text.split("\n")
    number = rng.randrange(max(1, len(lines) - 1))
    chance = rng.random()
    if chance < 0.7:
        lines[number], told = mutate_json(lines[number], rng)
    elif chance < 0.76:
        told = "remove a line"
        del lines[number]
    elif chance < 0.82:
        told = "repeat a line"
        lines[number:number] = [lines[number]] * rng.choice((1, 3, 1_000))
    elif chance < 0.88:
        told = "swap lines"
        other = rng.randrange(len(lines))
        lines[number], lines[other] = lines[other], lines[number]
    elif chance < 0.94:
        told = "cut a line"
        lines[number] = lines[number][: rng.randrange(len(lines[number]) + 1)]
    else:
        told = "join two lines"
        lines[number : number + 2] = ["".join(lines[number : number + 2])]
    return "\n".join(lines), f"line {number + 1}: {told}"


def _choose_place(holder: list[Any], rng: random.Random) -> tuple[Any, Any, str]:
    """Walk down from the top. Returns: a list or object, a key in it, and its path."""
    parent: Any = holder
    key: Any = 0
    path: list[str] = []
    while rng.random() < _DESCEND:
        value = parent[key]
        if isinstance(value, dict) and value:
            parent, key = value, rng.choice(list(value))
        elif isinstance(value, list) and value:
            parent, key = value, rng.randrange(len(value))
        else:
            break
        path.append(str(key)[:40])
    return parent, key, ".".join(path)


def _replace(parent: Any, key: Any, rng: random.Random) -> None:
    parent[key] = hostile_value(rng)


def _insert_raw(parent: Any, key: Any, rng: random.Random) -> str:
    parent[key] = _PLACEHOLDER
    return rng.choice(RAW_JSON)


def _remove(parent: Any, key: Any, rng: random.Random) -> None:
    del parent[key]


def _rename(parent: Any, key: Any, rng: random.Random) -> None:
    if isinstance(parent, dict):
        value = parent.pop(key)
        parent[rng.choice((str(key) + "_", str(hostile_value(rng)), str(key).upper()))] = value


def _repeat_key(parent: Any, key: Any, rng: random.Random) -> str | None:
    if not isinstance(parent, dict):
        return None
    value = json.dumps(parent[key])
    parent[key] = _PLACEHOLDER
    return f"{value},{json.dumps(key)}:{json.dumps(hostile_value(rng))}"


def _add_key(parent: Any, key: Any, rng: random.Random) -> None:
    value = parent[key]
    if isinstance(value, dict):
        value[str(hostile_value(rng))] = hostile_value(rng)
    elif isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), hostile_value(rng))
    else:
        parent[key] = {str(value): value}


def _change_slightly(parent: Any, key: Any, rng: random.Random) -> None:
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int | float):
        parent[key] = rng.choice((value + 1, -value, value * 2, value // 3, str(value)))
    elif isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        parent[key] = value[:at] + rng.choice(("", "x", "\n", "\u2028")) + value[at + 1 :]
    elif isinstance(value, list):
        parent[key] = rng.choice((value[1:], value[::-1], value * 2, value * _MANY))[:_MANY]
    elif isinstance(value, dict):
        parent[key] = rng.choice((list(value.values()), list(value), {**value, "extra": 1}))


def _swap(parent: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def _wrap(parent: Any, key: Any, rng: random.Random) -> None:
    parent[key] = rng.choice(([parent[key]], {"a": parent[key]}, json.dumps(parent[key])))


_OPERATIONS: tuple[Callable[[Any, Any, random.Random], str | None], ...] = (
    _replace, _replace, _replace, _insert_raw, _remove, _remove, _rename, _repeat_key, _add_key,
    _change_slightly, _change_slightly, _swap, _wrap,
)  # fmt: skip
