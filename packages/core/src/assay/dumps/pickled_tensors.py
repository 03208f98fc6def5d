"""Tensors that other tools wrote with `torch.save`, checked before their values are used."""

from pathlib import Path

import torch
from torch import Tensor

from assay.files import UnreadableFileError
from assay.models.weight_files.pickled import load_objects, require_stored

# An attention mask of 8 x 32 x 2,048 x 2,048 one-byte values, expanded over the heads, still fits.
_MAX_EXPANDED_BYTES = 1 << 30


def load_tensor(file: Path, name: str) -> Tensor:
    """Read the only content of `file`, which errors call `name`.

    Raises: UnreadableFileError as `require_values` does.
    """
    return require_values(file, name, load_objects(file))


def require_dense(file: Path, name: str, value: object) -> Tensor:
    """Return `value`, the entry `name` of `file`, as a tensor without gradient history.

    Raises: UnreadableFileError unless it is a dense tensor on the CPU.
    """
    if not isinstance(value, Tensor):
        raise UnreadableFileError.of(file, f"{name} is a {type(value).__name__}, not a tensor")
    if value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
        kind = "nested" if value.is_nested else f"{value.layout} on {value.device}"
        raise UnreadableFileError.of(file, f"{name} is not a dense tensor: {kind}")
    return value.detach()


def require_values(file: Path, name: str, value: object) -> Tensor:
    """Return `value`, the entry `name` of `file`, as a tensor whose values can be read.

    Tools save expanded tensors (stride 0) as they are: a file then holds fewer values than the
    tensor. Such a tensor is copied if it is small.
    Raises: UnreadableFileError unless it is a dense tensor, and if it claims far more values than are stored.
    """
    tensor = require_dense(file, name, value)
    size_bytes = tensor.numel() * tensor.element_size()  # Tensor.nbytes is modulo 2**64
    if size_bytes > tensor.untyped_storage().nbytes():
        if size_bytes > _MAX_EXPANDED_BYTES:
            raise UnreadableFileError.of(file, f"{name} has more elements than are stored")
        tensor = tensor.contiguous()
    return require_stored(file, name, tensor)
