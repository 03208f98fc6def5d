"""Checkpoints of the older kind, `pytorch_model.bin`: read with `weights_only`, never unpickled."""

import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from assay.files import UnreadableFileError, open_file
from assay.models.weight_files.hashing import StoredWeight, hash_values
from assay.models.weight_files.reading import weight_files
from assay.progress import counted

# Source: the README of the safetensors project, section "Format".
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def load_objects(file: Path) -> object:
    """Map a file of `torch.save` into memory. Only tensors and plain values are accepted.

    Raises: UnreadableFileError for any other content, and for a tensor that is larger than its storage.
    """
    try:
        with open_file(file):  # refuses a FIFO, on which torch would block
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnreadableFileError:
        raise
    except pickle.UnpicklingError:
        # torch's own message advises unsafe unpickling.
        problem = "it holds objects other than tensors, which assay does not unpickle"
        raise UnreadableFileError.of(file, problem) from None
    except Exception as error:  # noqa: BLE001 - any: damaged pickles and archives
        # torch's own messages advise other ways of loading.
        problem = f"it is not a file of torch.save, or it is cut off ({type(error).__name__})"
        raise UnreadableFileError.of(file, problem) from None


def require_stored(file: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, read from `file`, if it is dense and as large as its storage.

    Raises: UnreadableFileError otherwise.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnreadableFileError.of(file, f"{name} is a {tensor.layout} of {tensor.dtype}")
    if tensor.is_meta or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UnreadableFileError.of(file, f"{name} has more elements than are stored")
    return tensor.detach()


def _require_weight(file: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in SAFETENSORS_NAMES:
        raise UnreadableFileError.of(file, f"{name} is a {tensor.layout} of {tensor.dtype}")
    return require_stored(file, name, tensor)


def _load_file(file: Path) -> dict[str, torch.Tensor]:
    state = load_objects(file)
    if not isinstance(state, Mapping):
        raise UnreadableFileError.of(file, f"it holds a {type(state).__name__}, no tensors by name")
    return {
        str(key): _require_weight(file, str(key), one)
        for key, one in state.items()
        if isinstance(one, torch.Tensor)
    }


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


def pickled_weights(folder: Path) -> dict[str, StoredWeight]:
    """What `reading.stored_weights` gives for the same tensors in safetensors files."""
    found: dict[str, StoredWeight] = {}
    for name, value in counted("hashes its files", read_pickled(folder).items(), "tensors"):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        dtype, shape = SAFETENSORS_NAMES[value.dtype], tuple(value.shape)
        hashed = hash_values(dtype, shape, flat.numpy().data)
        found[name] = StoredWeight(dtype, shape, hashed)
    return found
