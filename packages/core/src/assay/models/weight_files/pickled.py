"""Checkpoints of the older kind, `pytorch_model.bin`: read with `weights_only`, never unpickled."""

import pickle
from collections import Counter
from pathlib import Path

import torch

from assay.errors import UsageError
from assay.models.weight_files.hashing import combine_hashes, hash_values
from assay.models.weight_files.reading import weight_files


def _load_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise UsageError(f"{file} cannot be read as a file of tensors: {error}") from error
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def read_pickled(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of `folder` by name, mapped and not yet read."""
    return {
        name: value for file in weight_files(folder) for name, value in _load_file(file).items()
    }


def pickled_dtype(folder: Path) -> str:
    """The dtype that most floating-point values in the files of `folder` are kept in."""
    counts: Counter[str] = Counter()
    for file in weight_files(folder):
        for value in _load_file(file).values():
            if value.is_floating_point():
                counts[str(value.dtype).removeprefix("torch.")] += value.numel()
    return counts.most_common(1)[0][0] if counts else "float32"


def pickled_hash(folder: Path) -> str:
    """The hash that `reading.checkpoint_hash` gives the same tensors in safetensors files."""
    hashes: dict[str, str] = {}
    for file in weight_files(folder):
        for name, value in _load_file(file).items():
            flat = value.contiguous().reshape(-1).view(torch.uint8)
            dtype = str(value.dtype).removeprefix("torch.")
            hashes[name] = hash_values(dtype, tuple(value.shape), flat.numpy().data)
    return combine_hashes(hashes)
