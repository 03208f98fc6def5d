"""Safe reading of the files of a dump. Dumps are untrusted: no path may leave their folder."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from torch import Tensor

from assay.dumps.protocol import DumpError
from assay.files import UnreadableFileError, open_file
from assay.models.stored_tensors import load_objects, require_stored

# An attention mask of 8 x 32 x 2,048 x 2,048 one-byte values, expanded over the heads, fits.
_MAX_EXPANDED_BYTES = 1 << 30
_READ_LONG_HEADER = np.lib.format.read_array_header_2_0


def path_inside(root: Path, name: str) -> Path:
    """Return the path of the file `name` in the dump folder `root`.

    Raises: UnreadableFileError if a link or the name leads out of the dump.
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
    return folder.resolve()


def require_inside(root: Path, folder: Path) -> None:
    """Raise UnreadableFileError if a link leads from `root` to a `folder` elsewhere.

    root: the user's path, which may be a link itself.
    """
    root = root.resolve()
    if folder.is_relative_to(root):
        path_inside(root, str(folder.relative_to(root)))


def map_array(file: Path) -> Tensor:
    """Map a .npy file into memory. The file does not change with the tensor.

    Raises: UnreadableFileError for other content and for object arrays.
    """
    with _no_array_in(file), open_file(file):  # refuses a FIFO, on which numpy would block
        # Copy on write: torch warns about read-only arrays.
        return _as_tensor(np.load(file, mmap_mode="c", allow_pickle=False))


@contextmanager
def _no_array_in(file: Path) -> Iterator[None]:
    try:
        yield
    except UnreadableFileError:
        raise
    except Exception as error:  # noqa: BLE001 - any: numpy parses the header as Python code
        raise UnreadableFileError.of(file, f"no array of numbers: {error}") from None


def _as_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def list_archive(file: Path) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of each array in an .npz file, without its values.

    Raises: UnreadableFileError for other content, and for arrays larger than their member of the archive.
    """
    found = []
    with _no_array_in(file), open_file(file) as stream, ZipFile(stream) as archive:
        for member in archive.infolist():
            with archive.open(member) as content:
                is_old = np.lib.format.read_magic(content) == (1, 0)
                read = np.lib.format.read_array_header_1_0 if is_old else _READ_LONG_HEADER
                shape, _, dtype = read(content)
            if prod(shape) * dtype.itemsize > member.file_size:
                raise UnreadableFileError.of(file, f"{member.filename} is cut off")
            if member.compress_type != ZIP_STORED and member.file_size > _MAX_EXPANDED_BYTES:
                raise UnreadableFileError.of(file, f"{member.filename} is too large to decompress")
            name = member.filename.removesuffix(".npy")
            found.append((name, _as_tensor(np.empty(0, dtype)).dtype, shape))
    return found


def read_archived(file: Path, name: str) -> Tensor:
    """Read one array of `list_archive`."""
    with _no_array_in(file), open_file(file) as stream, ZipFile(stream) as archive:
        member = name if name in archive.namelist() else f"{name}.npy"
        with archive.open(member) as content:
            return _as_tensor(np.lib.format.read_array(content, allow_pickle=False))


def load_tensor(file: Path, name: str) -> Tensor:
    """Read the tensor that `file`, an .npy file or one of `torch.save`, consists of.

    name: its name in errors.
    Raises: UnreadableFileError, see `require_values`.
    """
    if file.suffix == ".npy":
        return map_array(file)
    return require_values(file, name, load_objects(file))


def require_dense(file: Path, name: str, value: object) -> Tensor:
    """Return `value`, the entry `name` of `file`, as a detached tensor.

    Raises: UnreadableFileError unless `value` is a dense tensor on the CPU.
    """
    if not isinstance(value, Tensor):
        raise UnreadableFileError.of(file, f"{name} is a {type(value).__name__}, not a tensor")
    if value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
        kind = "nested" if value.is_nested else f"{value.layout} on {value.device}"
        raise UnreadableFileError.of(file, f"{name} is not a dense tensor: {kind}")
    return value.detach()


def require_values(file: Path, name: str, value: object) -> Tensor:
    """Return `value`, the entry `name` of `file`, as a readable tensor.

    Tools save expanded tensors (stride 0) without copying, so the file holds fewer values than the tensor
    has. A small one is copied.
    Raises: UnreadableFileError unless it is dense, and if it claims far more values than are stored.
    """
    tensor = require_dense(file, name, value)
    size_bytes = tensor.numel() * tensor.element_size()  # Tensor.nbytes is modulo 2**64
    if size_bytes > tensor.untyped_storage().nbytes():
        if size_bytes > _MAX_EXPANDED_BYTES:
            raise UnreadableFileError.of(file, f"{name} has more elements than are stored")
        tensor = tensor.contiguous()
    return require_stored(file, name, tensor)


_MAX_NESTING = 100  # the limit of JSON in `assay.files`


def walk_values(
    name: str, value: object, is_wanted: Callable[[object], bool], max_depth: int = _MAX_NESTING
) -> Iterator[tuple[str, Any]]:
    """Yield the wanted values in `value`. Each is named by `name` and the path of its keys.

    >>> list(walk_values("output", [1, {"a": 2}], lambda value: isinstance(value, int)))
    [('output.0', 1), ('output.1.a', 2)]
    """
    if is_wanted(value):
        yield name, value
    elif max_depth and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from walk_values(
                f"{name}.{key}".removeprefix("."), item, is_wanted, max_depth - 1
            )


_TOKEN = re.compile(r"[0-9]{1,9}")

Processes = list[tuple[Path, list[Path]]]
"""Each process folder with its token folders."""


def find_processes(
    path: Path, patterns: Iterable[str], is_call: Callable[[Path], bool]
) -> Processes:
    """Return `path` and its subfolders that match `patterns`, each with its token folders, in order.

    path: a folder around processes, a process folder, or a token folder.
    is_call: recognizes a call folder by its name.
    """

    def is_token(folder: Path) -> bool:
        return bool(_TOKEN.fullmatch(folder.name)) and any(
            is_call(call) and call.is_dir() for call in folder.glob("*")
        )

    path = path.resolve()
    if is_token(path):
        return [(path.parent, [path])]
    folders = {path, *(folder for pattern in patterns for folder in path.glob(pattern))}
    return [
        (folder, sorted(filter(is_token, folder.glob("[0-9]*")), key=natural_order))
        for folder in sorted(folders, key=natural_order)
    ]


def find_root(path: Path, processes: Processes) -> Path:
    """Return the parent folder of all processes.

    Raises: DumpError if they have several, UnreadableFileError if a process lies outside of `path`.
    """
    roots = sorted({process.parent for process, _ in processes})
    if len(roots) > 1:
        names = (str(root.relative_to(path.resolve())) for root in roots)
        raise DumpError.of_several(path, "dumps", names)
    for process, _ in processes:
        require_inside(path, process)
    return roots[0]


def natural_order(path: Path | str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts npu2 before npu10."""
    name = str(path)
    parts = re.findall("[0-9]{1,18}|[^0-9]+", name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], name
