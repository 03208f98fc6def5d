"""Which stored tensors make up which parameter or buffer of a model.

Names and conversions are those that transformers publishes for the model's class; the values are
put together here from the stored ones. A tensor that is stored under the name of a place of the same
shape belongs there, whatever a renaming says that would move it to another layer.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or buffer by its name in the model, and the stored tensors that make it up.

    make: puts its value together from the stored ones; of several it is made anew at each call.
    """

    name: str
    stored_as: tuple[str, ...]
    make: Callable[[], Tensor]


@dataclass(slots=True)
class Places:
    """All places whose values the files hold.

    unused: stored tensors that belong to no place; unknown: places whose conversion is not known.
    """

    places: list[Place] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """Stored tensors that one converter turns into one or more places."""

    converter: Any
    first_place: str
    by_pattern: dict[str, list[str]] = field(default_factory=dict)


def find_places(model: Any, stored: Mapping[str, Tensor]) -> Places:  # noqa: ANN401 - transformers
    """The places of `model`, a model of transformers, whose values are `stored`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    state: dict[str, Tensor] = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = Places()
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=_natural_order):
        place, pattern = _place_of(name, model, state, renamings, converters)
        if place not in state:
            found.unused.append(name)
        elif pattern is None:
            found.places.append(Place(place, (name,), partial(stored.__getitem__, name)))
        else:
            converter = next(one for one in converters if pattern in one.source_patterns)
            group = groups.setdefault(place, _Group(converter, place))
            group.by_pattern.setdefault(pattern, []).append(name)
    for group in groups.values():
        _convert(group, model, state, stored, found)
    return found


def _place_of(
    name: str,
    model: Any,  # noqa: ANN401 - transformers
    state: dict[str, Tensor],
    renamings: list[Any],
    converters: list[Any],
) -> tuple[str, str | None]:
    """The place of the stored tensor `name`, and the pattern of the converter that it goes through."""
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if renamed in state and (pattern is not None or _numbers(renamed) == _numbers(name)):
        return renamed, pattern
    own = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    here = next((one for one in own if one in state), None)
    return (here, None) if here is not None else (renamed, pattern)


def _numbers(name: str) -> list[str]:
    """The numbers of layers and experts in a name."""
    return _NUMBER.findall(name)


def _natural_order(name: str) -> list[tuple[int, str]]:
    # transformers collects the experts in this order.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _convert(
    group: _Group,
    model: Any,  # noqa: ANN401 - transformers
    state: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    found: Places,
) -> None:
    names = tuple(name for part in group.by_pattern.values() for name in part)
    values = {
        pattern: [stored[name] for name in part] for pattern, part in group.by_pattern.items()
    }
    targets = [
        group.first_place.replace(group.converter.target_patterns[0], pattern, 1)
        for pattern in group.converter.target_patterns
    ]

    def make(place: str) -> Tensor:
        own = _apply(group.converter, values, len(targets))
        if own is not None:
            return own[targets.index(place)]
        return _apply_theirs(group, model, values)[place]

    for place in targets:
        if place in state:
            found.places.append(Place(place, names, partial(make, place)))
        else:
            found.unknown[place] = f"made of {', '.join(names[:2])}, and no place of the model"


def _apply(
    converter: Any,  # noqa: ANN401 - transformers
    values: Mapping[str, list[Tensor]],
    num_targets: int,
) -> list[Tensor] | None:
    """What the converter's operations make of the stored values; None if one is not known here."""
    parts: list[list[Tensor]] = [
        values[pattern] for pattern in converter.source_patterns if pattern in values
    ]
    for operation in converter.operations:
        match type(operation).__name__:
            case "MergeModulelist":
                parts = [[torch.stack(part, operation.dim)] for part in parts]
            case "Concatenate":
                parts = [[torch.cat([one for part in parts for one in part], operation.dim)]]
            case "Chunk" if operation.num_shards_attribute is None and len(parts) == 1:
                parts = [[one] for one in parts[0][0].chunk(num_targets, operation.dim)]
            case "Transpose" if not operation.check_dims and len(parts) == 1:
                parts = [[parts[0][0].transpose(operation.dim0, operation.dim1)]]
            case _:
                return None
    made = [one for part in parts for one in part]
    return made if len(made) == num_targets else None


def _apply_theirs(
    group: _Group,
    model: nn.Module,
    values: Mapping[str, list[Tensor]],
) -> dict[str, Tensor]:
    """What transformers' own code for the conversion makes of the stored values."""
    converter = copy.deepcopy(group.converter)
    for pattern, tensors in values.items():
        for tensor in tensors:
            converter.add_tensor(group.first_place, pattern, pattern, tensor)
    made = converter.convert(group.first_place, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
