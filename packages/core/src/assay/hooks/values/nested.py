"""Ports of nested arguments and results: the tensors of a structure by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

Leaf = tuple[str, Any]

_CONSTANTS = (bool, int, float, str, type(None))


def iterate_leaves(value: object, port: str) -> Iterator[Leaf]:
    """Yield every leaf of dictionaries (ModelOutput too), lists, tuples and dataclasses with its port.

    Objects of other classes, such as caches, are leaves.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from iterate_leaves(item, f"{port}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from iterate_leaves(item, f"{port}.{index}")
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from iterate_leaves(getattr(value, item.name), f"{port}.{item.name}")
    else:
        yield port, value


def iterate_tensors(value: object, port: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the leaves of `value`."""
    for name, leaf in iterate_leaves(value, port):
        if isinstance(leaf, Tensor):
            yield name, leaf


def constants(value: object, port: str) -> dict[str, object]:
    """Return the leaves of `value` that JSON can hold, by port."""
    return {
        name: leaf for name, leaf in iterate_leaves(value, port) if isinstance(leaf, _CONSTANTS)
    }


def map_tensors(  # noqa: PLR0911 - one for each kind of structure
    value: Any,  # noqa: ANN401 - any structure
    port: str,
    change: Callable[[str, Tensor], Tensor],
) -> Any:  # noqa: ANN401
    """Replace every tensor of a structure by `change(port, tensor)`.

    Returns: `value` itself if nothing changed, which keeps identity, else a structure of its type.
    """
    if isinstance(value, Tensor):
        return change(port, value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, f"{port}.{key}", change) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        return _rebuild_mapping(value, items)
    if isinstance(value, list | tuple):
        parts = [map_tensors(item, f"{port}.{index}", change) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for item in fields(value):
            old = getattr(value, item.name)
            new = map_tensors(old, f"{port}.{item.name}", change)
            if new is not old:
                changes[item.name] = new
        return replace(value, **changes) if changes else value
    return value


def _rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    if type(value) is dict:
        return items
    # A ModelOutput is a mapping and a dataclass: it takes its items by name.
    kind: Callable[..., Any] = type(value)
    return kind(**items) if is_dataclass(value) else kind(items)
