"""Find the stored tensors that make up each parameter of a model, and convert them.

The names and conversions of the stored tensors are those that transformers publishes for the model's class. This module
converts the stored values itself. A tensor stored under the name of a parameter of the same shape belongs to that
parameter, even if a renaming would move it to another layer.
"""

# ruff: noqa: ANN401 - objects of transformers

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
class TensorSource:
    """The stored tensors that make up one parameter or buffer."""

    name: str
    """Name in the model."""
    make: Callable[[], Tensor]
    """Compute the value from the stored tensors, at each call again."""


@dataclass(slots=True)
class TensorSources:
    """All parameters and buffers whose values the files hold."""

    sources: list[TensorSource] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Stored tensors without a parameter or buffer."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Parameters and buffers whose conversion is unknown, with the reasons."""


@dataclass(slots=True)
class _Group:
    """Stored tensors that one converter turns into one or more parameters."""

    converter: Any
    first_name: str
    by_pattern: dict[str, list[str]] = field(default_factory=dict)


def find_sources(model: Any, stored: Mapping[str, Tensor]) -> TensorSources:
    """Match the stored tensors with the parameters and buffers of a transformers model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    state: dict[str, Tensor] = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = TensorSources()
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=_natural_order):
        own_name, pattern = _name_in_model(name, model, state, renamings, converters)
        if own_name not in state:
            found.unused.append(name)
        elif pattern is None:
            found.sources.append(TensorSource(own_name, partial(stored.__getitem__, name)))
        else:
            converter = next(one for one in converters if pattern in one.source_patterns)
            group = groups.setdefault(own_name, _Group(converter, own_name))
            group.by_pattern.setdefault(pattern, []).append(name)
    for group in groups.values():
        _convert(group, model, state, stored, found)
    return found


def _name_in_model(
    name: str, model: Any, state: dict[str, Tensor], renamings: list[Any], converters: list[Any]
) -> tuple[str, str | None]:
    """Return the name in the model of the stored tensor `name`, and the pattern of its converter."""
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if renamed in state and (pattern is not None or _numbers(renamed) == _numbers(name)):
        return renamed, pattern
    own = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    found = next((one for one in own if one in state), None)
    return (found, None) if found is not None else (renamed, pattern)


def _numbers(name: str) -> list[str]:
    return _NUMBER.findall(name)


def _natural_order(name: str) -> list[tuple[int, str]]:
    # transformers collects the experts in this order.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _convert(
    group: _Group,
    model: Any,
    state: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    found: TensorSources,
) -> None:
    names = tuple(name for part in group.by_pattern.values() for name in part)
    outputs = [
        group.first_name.replace(group.converter.target_patterns[0], pattern, 1)
        for pattern in group.converter.target_patterns
    ]

    def make(name: str) -> Tensor:
        values = {
            pattern: [stored[one] for one in part] for pattern, part in group.by_pattern.items()
        }
        own = _apply(group.converter, values, len(outputs))
        if own is not None:
            return own[outputs.index(name)]
        return _apply_theirs(group, model, values)[name]

    for name in outputs:
        if name in state:
            found.sources.append(TensorSource(name, partial(make, name)))
        else:
            found.unknown[name] = f"made of {', '.join(names[:2])}, but not in the model"


def _apply(
    converter: Any, values: Mapping[str, list[Tensor]], num_outputs: int
) -> list[Tensor] | None:
    """Apply the converter's operations to the stored values; return None if one is unknown here."""
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
                parts = [[one] for one in parts[0][0].chunk(num_outputs, operation.dim)]
            case "Transpose" if not operation.check_dims and len(parts) == 1:
                parts = [[parts[0][0].transpose(operation.dim0, operation.dim1)]]
            case _:
                return None
    made = [one for part in parts for one in part]
    return made if len(made) == num_outputs else None


def _apply_theirs(
    group: _Group, model: nn.Module, values: Mapping[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Apply transformers' own code for the conversion to the stored values."""
    converter = copy.deepcopy(group.converter)
    for pattern, tensors in values.items():
        for tensor in tensors:
            converter.add_tensor(group.first_name, pattern, pattern, tensor)
    made = converter.convert(group.first_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class UnknownFormError(ValueError):
    """Error for a stored form that cannot be converted into the one in memory."""


def value_in_form(source: TensorSource, actual: Tensor) -> Tensor:
    """Return the stored value in the shape of `actual` and in its stored dtype.

    Raises: UnknownFormError for another form, such as a quantized one or another shape.
    """
    try:
        value = source.make()
    except Exception as error:  # any: operations of transformers
        raise UnknownFormError(f"its conversion raised {type(error).__name__}: {error}") from error
    as_stored = value
    if value.shape != actual.shape and value.dim() == 2:
        value = value.t()
    # Codes of quantized weights have dims. A single integer, such as a norm's count of batches, is a value.
    same_kind = not value.dim() or value.dtype.is_floating_point == actual.dtype.is_floating_point
    if value.shape != actual.shape or not same_kind:
        raise UnknownFormError(f"stored as {_describe(as_stored)}, in memory {_describe(actual)}")
    return value


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
