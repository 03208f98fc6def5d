"""The stored tensors of one side of a comparison: a model folder, or a dump with weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.files import read_json_object
from assay.foreign_text import shorten
from assay.models.weight_files.mapping import map_tensor
from assay.models.weight_files.pickled import read_pickled
from assay.models.weight_files.reading import read_tensors, weight_files

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
    return WeightStore(
        folder,
        {name: one.shape for name, one in stored.items()},
        lambda name: map_tensor(stored[name]),
        {name: one.file for name, one in stored.items()},
        quantization,
        dtype,
    )
