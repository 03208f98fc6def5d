"""The stored tensors of one side of a comparison, a model folder or a dump with weights; readers of its formats share this."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.files import read_json_object
from assay.files.safetensors import read_whole_header
from assay.foreign_text import shorten
from assay.models.gguf_files import GGUF, read_gguf
from assay.models.quantization.quantized_weight import Groups, InputRounding, QuantizedWeight
from assay.models.stored_tensors import map_tensor, read_pickled
from assay.models.weight_files import read_tensors, weight_files

_CONFIG = "config.json"
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class WeightStore:
    """Tensors by name, read one at a time."""

    origin: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    files: Mapping[str, Path] = field(default_factory=dict)
    """File of each tensor."""
    quantization: Mapping[str, object] = field(default_factory=dict)
    """`quantization_config` of the model; empty without quantization."""
    dtype: torch.dtype | None = None
    """Dtype of the model before its quantization, if config.json has one."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts of the safetensors files, by key."""
    plus_one: frozenset[str] = frozenset()
    """Tensors that are stored plus one, in float32."""

    def refuse(self, name: str, problem: str) -> UsageError:
        """Make the error for an unusable tensor, naming its file."""
        return UsageError(f"{self.files.get(name, self.origin)}: {shorten(name)} {problem}")

    def refuse_setting(self, key: str) -> UsageError:
        """Make the error for an unreadable quantization setting."""
        value = shorten(self.quantization.get(key))
        return UsageError(
            f"{self.origin / _CONFIG}: quantization_config.{key} = {value} cannot be read"
        )

    def fetch(self, name: str, owner: str, shape: tuple[int | None, ...] | None = None) -> Tensor:
        """Read the tensor `name`, a part of the weight `owner`.

        shape: the required shape, with None for a dim of any size.
        Raises: UsageError, naming the file, if the tensor is absent or has another shape.
        """
        if name not in self.shapes:
            raise self.refuse(owner, f"is quantized, but {shorten(name)} is missing")
        actual = self.shapes[name]
        if shape is not None and (
            len(actual) != len(shape)
            or any(want not in (None, size) for size, want in zip(actual, shape, strict=True))
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.refuse(name, f"has the shape {list(actual)}, expected [{wanted}]")
        return self.read(name)


def open_folder(folder: Path) -> WeightStore:
    """Read the headers of the weight files of a model folder.

    Raises: UsageError, naming file and key.
    """
    config = read_json_object(folder / _CONFIG)
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise UsageError(f"{folder / _CONFIG}: quantization_config is not a table")
    dtype = _FLOATS.get(str(config.get("dtype", config.get("torch_dtype"))))
    found = read_tensors(folder)
    if found is None:
        tensors = read_pickled(folder)
        files = weight_files(folder)
        return WeightStore(
            folder,
            {name: tuple(value.shape) for name, value in tensors.items()},
            tensors.__getitem__,
            dict.fromkeys(tensors, files[0]) if len(files) == 1 else {},
            quantization,
            dtype,
        )
    stored = {one.name: one for one in found}
    header = read_gguf(folder / GGUF) if (folder / GGUF).is_file() else None

    def read(name: str) -> Tensor:
        tensor = map_tensor(stored[name])
        return tensor if header is None else header.restore(name, tensor)

    metadata: dict[str, str] = {}
    for file in () if header else weight_files(folder):
        metadata |= read_whole_header(file)[1]
    return WeightStore(
        folder,
        {name: one.shape for name, one in stored.items()},
        read,
        {name: one.file for name, one in stored.items()},
        quantization,
        dtype,
        metadata,
        frozenset() if header is None else header.plus_one,
    )


class ContradictionError(ValueError):
    """Error for a weight whose stored form contradicts the settings, so that loaders differ."""

    @classmethod
    def of(cls, module: str, key: str, verb: str = "names") -> Self:
        """Make the error for a quantized module that a setting excludes."""
        return cls(f"{module}.weight (quantized, though quantization_config.{key} {verb} it)")


@dataclass(frozen=True)
class Format:
    """One way to store a weight `NAME.weight` as several tensors."""

    marker: str
    """A module `NAME` is quantized if this tensor is stored as `NAME.marker`."""
    scales: str
    """The tensor with one element per group."""
    parts: tuple[str, ...]
    """All tensors of a quantized module except its bias, without the module name."""
    read: Callable[[WeightStore, str], QuantizedWeight]
    """Read the named module. Raises: UsageError, naming file and key."""
    inputs: Callable[[WeightStore, str], InputRounding | None] = lambda _stored, _module: None
    """Return how the named module rounds its inputs; None if it does not."""
    values: Callable[[WeightStore, str], Tensor] | None = None
    """Return the values of a format whose library computes them in float32 at the load; None for others."""


def override_settings(stored: WeightStore, module: str) -> WeightStore:
    """Return `stored` with the quantization settings of one module.

    GPTQModel 7.7 keeps them in `dynamic`, by patterns of which the first that matches counts (`-:` for
    modules that are not quantized); auto-round 0.16 in `extra_config`, by names and patterns.
    Raises: ContradictionError for a module that is not quantized by them.
    """
    for key in ("dynamic", "extra_config"):
        settings = stored.quantization.get(key) or {}
        if not isinstance(settings, dict):
            raise stored.refuse_setting(key)
        for pattern, own in settings.items():
            sign, _, text = (
                pattern.partition(":") if pattern[:2] in ("+:", "-:") else ("", "", pattern)
            )
            if text != module and not _matches(text, module):
                continue
            if sign == "-":
                raise ContradictionError.of(module, key, "excludes")
            if not isinstance(own, dict):
                raise stored.refuse_setting(key)
            return replace(stored, quantization={**stored.quantization, **own})
    return stored


def require_included(stored: WeightStore, module: str) -> None:
    """Raise ContradictionError for a quantized module that the settings exclude from quantization.

    compressed-tensors 0.20 takes names and patterns (`re:`), transformers 5.23 patterns that match from
    the start or are the end of a name.
    """
    for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules"):
        names = stored.quantization.get(key)
        for name in map(str, names if isinstance(names, list) else ()):
            pattern = rf"(?:{name})(?:(?<=\.)|(?=\.|$))"
            if key == "ignore":
                is_excluded = is_named(name, module)
            else:
                is_excluded = module.endswith(name) or _matches(pattern, module)
            if is_excluded:
                raise ContradictionError.of(module, key)


def is_named(target: str, module: str) -> bool:
    """Return True for the module's name, in full or as a pattern (`re:`)."""
    if target.startswith("re:"):
        return _matches(target.removeprefix("re:"), module)
    return target == module


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def parse_count(stored: WeightStore, key: str, allowed: range, *others: object) -> int:
    """Read an integer setting of the quantization.

    others: values to use if `key` is absent.
    Raises: UsageError if the value is not in `allowed`.
    """
    value = next((one for one in (stored.quantization.get(key), *others) if one is not None), None)
    if type(value) is not int or value not in allowed:
        raise stored.refuse_setting(key)
    return value


def parse_group_size(stored: WeightStore, key: str, num_columns: int, *others: object) -> int:
    """Read the number of columns that share a scale; -1 in the settings stands for all."""
    size = parse_count(stored, key, range(-1, 1 << 30), *others)
    if size == 0:
        raise stored.refuse_setting(key)
    return num_columns if size == -1 else size


def per_group(stored: WeightStore, name: str, values: Tensor, groups: Groups) -> Tensor:
    """Return scales or zero points as one float32 per group.

    Raises: UsageError if `values` has another number of elements.
    """
    if values.numel() != groups.num_groups:
        down, across = groups.grid_shape
        problem = f"has {values.numel()} values for {down} x {across} groups"
        raise stored.refuse(name, problem)
    return values.reshape(-1).float()


def precision_of(scales: Tensor) -> float:
    """Return the unit roundoff of the dtype of stored scales.

    Scales of 8 bits count as exact because codes are rounded with the stored scale.
    """
    if not scales.is_floating_point() or scales.itemsize == 1:
        return 0.0
    return float(torch.finfo(scales.dtype).eps) / 2


_BYTE_BITS = 8


def unpack_bits(packed: Tensor, num_bits: int, count: int) -> Tensor:
    """Unpack the first `count` integers of each row.

    A row is a stream of bits that starts with the lowest bit of its first byte. An integer may cross bytes
    and words. The GPTQ and compressed-tensors libraries write 2, 3, 4 and 8 bits this way.

    packed: integers of any width, [rows, words].
    Returns: uint8, [rows, count].
    """
    data = packed.contiguous().view(torch.uint8).reshape(len(packed), -1)
    if num_bits == _BYTE_BITS:
        return data[:, :count]
    mask = (1 << num_bits) - 1
    if _BYTE_BITS % num_bits == 0:
        shifts = torch.arange(0, _BYTE_BITS, num_bits, dtype=torch.uint8)
        return ((data.unsqueeze(-1) >> shifts) & mask).flatten(1)[:, :count]
    first_bit = torch.arange(count) * num_bits
    data = torch.nn.functional.pad(data, (0, 1))
    low = data[:, first_bit // _BYTE_BITS].to(torch.int32)
    high = data[:, first_bit // _BYTE_BITS + 1].to(torch.int32)
    return (((low | high << _BYTE_BITS) >> first_bit % _BYTE_BITS) & mask).to(torch.uint8)


def packed_width(num_bits: int, count: int) -> int:
    """Return the number of 32-bit words that hold `count` integers.

    >>> packed_width(3, 64)
    6
    """
    return -(-count * num_bits // 32)
