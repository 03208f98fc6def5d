"""Values in nested mappings and lists."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_NESTING = 100  # the limit of JSON in `assay.files`


def walk_values(
    name: str, value: object, is_wanted: Callable[[object], bool], max_depth: int = _MAX_NESTING
) -> Iterator[tuple[str, Any]]:
    """Yield the wanted values in `value`. Each is named by `name` and the path of its keys.

    >>> list(walk_values("output", [1, {"a": 2}], lambda value: isinstance(value, int)))
    [('output.0', 1), ('output.1.a', 2)]
    """
    if is_wanted(value):
        yield name, value
    elif max_depth and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from walk_values(
                f"{name}.{key}".removeprefix("."), item, is_wanted, max_depth - 1
            )
