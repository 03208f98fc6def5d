"""JSON that also carries the numbers JSON has not: NaN and the infinities."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# A float that JSON cannot say is written {"$float": "nan"}, so that every line stays valid JSON
# for other readers and comes back as the float it was.
_TAG = "$float"


def _tagged(value: Any) -> Any:  # noqa: ANN401 - walks any JSON value
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: repr(value)}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    return value


def _untagged(value: dict[str, Any]) -> Any:  # noqa: ANN401 - returns any JSON value
    return float(value[_TAG]) if value.keys() == {_TAG} else value


def to_text(value: object) -> str:
    """One line of JSON.

    Raises: TypeError for what is no JSON value.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_tagged(value), allow_nan=False, separators=(",", ":"))


def from_text(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """What `to_text` was given, tuples as lists.

    Raises: ValueError if `text` is not JSON, RecursionError if it is nested too deep.
    """
    return json.loads(text, object_hook=_untagged if _TAG in text else None)
