"""Reading the files of a dump. It comes from another machine: no path may leave its folder."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file
from assay.models.weight_files.pickled import load_objects, require_stored

# An attention mask of 8 x 32 x 2,048 x 2,048 one-byte values, expanded over the heads, still fits.
_MAX_EXPANDED_BYTES = 1 << 30


def path_inside(root: Path, name: str) -> Path:
    """Return the path of the file `name` of the dump in the folder `root`.

    Raises: UnreadableFileError if it lies outside of the dump, through a link or its name.
    """
    path = root / name
    try:
        name.encode()
        is_plain = not (path.name == ".." or "\0" in name or path.is_symlink())
        resolved = _resolve(path.parent) / path.name if is_plain else path.resolve()
        is_inside = resolved.is_relative_to(_resolve(root))
    except UnicodeEncodeError:
        raise UnreadableFileError.of(path, "its name is not UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a NUL character
        raise UnreadableFileError.of(path, error) from None
    if not is_inside:
        raise UnreadableFileError.of(path, "it lies outside of the dump")
    return path


@lru_cache(maxsize=1024)
def _resolve(folder: Path) -> Path:
    """Resolve the links of a folder, which holds many files."""
    return folder.resolve()


def require_inside(root: Path, folder: Path) -> None:
    """Raise UnreadableFileError if `folder`, found below `root` or around it, lies elsewhere.

    root: the path that the user gave. It may be a link.
    """
    root = root.resolve()
    if folder.is_relative_to(root):
        path_inside(root, str(folder.relative_to(root)))


def map_array(file: Path) -> Tensor:
    """Map a .npy file into memory. Changes to the tensor are not written to the file.

    Raises: UnreadableFileError, naming the file, for any other content, and for arrays of objects.
    """
    try:
        with open_file(file):  # refuses a FIFO, on which numpy would block
            # Copy on write: torch warns about arrays that cannot be written to.
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except UnreadableFileError:
        raise
    except Exception as error:  # noqa: BLE001 - any: numpy parses the header as Python code
        raise UnreadableFileError.of(file, f"no array of numbers: {error}") from None


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
