"""JSON with NaN and the infinities, which plain JSON lacks."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# Such a float is written {"$float": "nan"}: every line is valid JSON for other readers.
_TAG = "$float"


def _tagged(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: repr(value)}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    return value


def _untagged(value: dict[str, str]) -> float | dict[str, str]:
    return float(str(value[_TAG])) if value.keys() == {_TAG} else value


def to_text(value: object) -> str:
    """Convert a value to one line of JSON.

    Raises: TypeError if it has no JSON form.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_tagged(value), allow_nan=False, separators=(",", ":"))


def from_text(text: str) -> Json:
    """Convert the result of `to_text` back, with lists for tuples.

    Raises: ValueError if `text` is not JSON, RecursionError if it is nested too deep.
    """
    value: Json = json.loads(text, object_hook=_untagged if _TAG in text else None)
    return value
