"""Ports of nested arguments and results: the tensors of a structure by name."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from operator import is_
from typing import Any, Literal

from torch import Tensor

Leaf = tuple[str, Any]

_CONSTANTS = (bool, int, float, str, type(None))


@lru_cache(maxsize=1024)
def _structure_of(kind: type) -> Literal["mapping", "sequence", "dataclass"] | None:
    """Return how objects of a class hold others; None for leaves, such as tensors and caches."""
    if issubclass(kind, Tensor):
        return None
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple):
        return "sequence"
    return "dataclass" if is_dataclass(kind) else None


def iterate_leaves(value: object, port: str) -> list[Leaf]:
    """Return every leaf of dictionaries (ModelOutput too), lists, tuples and dataclasses with its port.

    Objects of other classes, such as caches, are leaves.
    """
    found: list[Leaf] = []
    _add_leaves(found, value, port)
    return found


def _add_leaves(found: list[Leaf], value: Any, port: str) -> None:  # noqa: ANN401 - any structure
    kind: Any = type(value)
    match _structure_of(kind):
        case None:
            found.append((port, value))
        case "mapping":
            for key, item in value.items():
                _add_leaves(found, item, f"{port}.{key}")
        case "sequence":
            for index, item in enumerate(value):
                _add_leaves(found, item, f"{port}.{index}")
        case "dataclass":
            for one in fields(value):
                _add_leaves(found, getattr(value, one.name), f"{port}.{one.name}")


def iterate_tensors(value: object, port: str) -> list[tuple[str, Tensor]]:
    """Return the tensors among the leaves of `value`."""
    return [leaf for leaf in iterate_leaves(value, port) if isinstance(leaf[1], Tensor)]


def constants(value: object, port: str) -> dict[str, object]:
    """Return the leaves of `value` that JSON can hold, by port."""
    return {
        name: leaf for name, leaf in iterate_leaves(value, port) if isinstance(leaf, _CONSTANTS)
    }


def map_tensors(
    value: Any,  # noqa: ANN401 - any structure
    port: str,
    change: Callable[[str, Tensor], Tensor],
) -> Any:  # noqa: ANN401
    """Replace every tensor of a structure by `change(port, tensor)`.

    Returns: `value` itself if nothing changed, which keeps identity, else a structure of its type.
    """
    kind: Any = type(value)
    match _structure_of(kind):
        case None:
            return change(port, value) if isinstance(value, Tensor) else value
        case "mapping":
            items = {key: map_tensors(item, f"{port}.{key}", change) for key, item in value.items()}
            if all(map(is_, items.values(), value.values())):
                return value
            return _rebuild_mapping(value, items)
        case "sequence":
            parts = [map_tensors(one, f"{port}.{index}", change) for index, one in enumerate(value)]
            if all(map(is_, parts, value)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        case "dataclass":
            changes = {}
            for item in fields(value):
                old = getattr(value, item.name)
                new = map_tensors(old, f"{port}.{item.name}", change)
                if new is not old:
                    changes[item.name] = new
            return replace(value, **changes) if changes else value


def _rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    if type(value) is dict:
        return items
    # A ModelOutput is a mapping and a dataclass: it takes its items by name.
    kind: Callable[..., Any] = type(value)
    return kind(**items) if is_dataclass(value) else kind(items)
