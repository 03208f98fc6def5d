"""Loose tensor files: safetensors, .npy, and .pt or .pth with a tensor or tensors by name.

They record no module calls. Module and port are guessed from each tensor's name.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from assay.dumps.damaged_files import DamagedFiles
from assay.dumps.numpy_files import map_array
from assay.dumps.paths import path_inside
from assay.dumps.pickled_tensors import require_values
from assay.dumps.protocol import Dump, DumpedTensor
from assay.files import UnreadableFileError
from assay.models.weight_files.mapping import dtype_of, map_tensor
from assay.models.weight_files.pickled import load_objects
from assay.models.weight_files.reading import read_header
from assay.sites import CallSite, Site, unwrapped_path

_MAX_FOLDER_DEPTH = 3
_MAX_NESTING = 8
# `a.b.output`, `a.b.output.1`, `a.b.input.0`, `a.b.input.hidden_states`. A module may be called
# `output`, so no other name follows it.
_CALL = re.compile(r"(?:(.+)\.)?(input(?:\.[A-Za-z_]\w*)?(?:\.\d+)*|output(?:\.\d+)*)")
_PARAMETER = re.compile(r"(?:(.+?)\.)?(?:parameter\.)?((?:weight|bias)(?:_\w+)?)")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file. Its values are read by `load`. name: "" in a file of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class TensorFilesReader:
    """Reader of one tensor file, or of a folder that holds nothing else."""

    name = "tensors"

    def recognize(self, path: Path) -> bool:
        """Return True if `path` is a tensor file, or a folder with only such files."""
        if not path.is_dir():
            return path.is_file() and path.suffix in _READERS
        files = _walk_files(path, _MAX_FOLDER_DEPTH)
        first = next(files, None)
        return first is not None and all(file.suffix in _READERS for file in (first, *files))

    def open(self, path: Path) -> Dump:
        """List the tensors of every file."""
        folder = path if path.is_dir() else path.parent
        files = sorted(_walk_files(path, _MAX_FOLDER_DEPTH)) if path.is_dir() else [path]
        found: list[tuple[Path, _Entry]] = []
        damaged = DamagedFiles()
        for file in files:
            path_inside(folder, str(file.relative_to(folder)))
            with damaged.skipped():
                found += [
                    (file.relative_to(folder), entry) for entry in _READERS[file.suffix](file)
                ]
        sites = _name_sites([(file, entry.name) for file, entry in found])
        keys = [f"{file}:{entry.name}".removesuffix(":") for file, entry in found]
        loaders = {key: entry.load for key, (_, entry) in zip(keys, found, strict=True)}
        tensors = [
            DumpedTensor(site, key, order, dtype=entry.dtype, shape=entry.shape)
            for order, (site, key, (_, entry)) in enumerate(zip(sites, keys, found, strict=True))
        ]
        return Dump(
            format=self.name,
            path=path,
            tensors=tensors,
            read=lambda tensor: loaders[tensor.key](),
            provenance={"names": "modules are guessed from the names of tensors"},
            problems=damaged.list_problems(tensors),
        )


def _walk_files(folder: Path, max_depth: int) -> Iterator[Path]:
    """Yield everything in a folder but its subfolders of up to `max_depth` levels, and hidden files."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if max_depth and path.is_dir() and not path.is_symlink():
            yield from _walk_files(path, max_depth - 1)
        else:
            yield path


def _name_sites(names: Sequence[tuple[Path, str]]) -> list[Site]:
    """Return the address of each tensor, from its file and its name in it ("" if it has none).

    A name that occurs in several files is preceded by that of its file.
    """
    stems = [".".join(file.with_suffix("").parts) for file, _ in names]
    counts = Counter(name for _, name in names)
    full_names = [
        name if name and counts[name] == 1 else f"{stem}.{name}".removesuffix(".")
        for stem, (_, name) in zip(stems, names, strict=True)
    ]
    guesses = [_guess_site(name) for name in full_names]
    num_guesses = Counter(guesses)
    return [
        guess if num_guesses[guess] == 1 else Site(CallSite(0, name), "output")
        for guess, name in zip(guesses, full_names, strict=True)
    ]


def _guess_site(name: str) -> Site:
    module, port = name, "output"
    if found := _PARAMETER.fullmatch(name):
        module, port = found[1] or "", f"parameter.{found[2]}"
    elif found := _CALL.fullmatch(name):
        module, port = found[1] or "", found[2]
    return Site(CallSite(0, unwrapped_path(module)), port)


def _read_safetensors(file: Path) -> Iterator[_Entry]:
    for stored in read_header(file):
        yield _Entry(stored.name, dtype_of(stored), stored.shape, partial(map_tensor, stored))


def _read_array(file: Path) -> Iterator[_Entry]:
    yield _entry("", map_array(file), partial(map_array, file))


def _read_pickled(file: Path) -> Iterator[_Entry]:
    found = _map_objects(file)
    if not found:
        raise UnreadableFileError.of(file, "it holds no tensors")
    for name, tensor in found.items():
        yield _entry(name, tensor, partial(_load_object, file, name))


def _load_object(file: Path, name: str) -> Tensor:
    found = _map_objects(file)
    if name not in found:
        raise UnreadableFileError.of(file, f"it no longer holds {name or 'a tensor'}")
    return found[name]


def _map_objects(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `torch.save` by name; a single tensor has the name ""."""
    try:
        return _map_version(file, file.stat().st_mtime_ns)
    except OSError as error:
        raise UnreadableFileError.of(file, error) from None


@lru_cache(maxsize=4)  # both sides of a comparison read such a file tensor by tensor
def _map_version(file: Path, _modified_ns: int) -> dict[str, Tensor]:
    found = dict(_walk_objects("", load_objects(file), 0))
    return {name: require_values(file, name or "it", tensor) for name, tensor in found.items()}


def _walk_objects(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested mappings and lists, by the path of their keys."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth < _MAX_NESTING and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _walk_objects(f"{name}.{key}".removeprefix("."), item, depth + 1)


def _entry(name: str, tensor: Tensor, load: Callable[[], Tensor]) -> _Entry:
    return _Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), load)


_READERS: Mapping[str, Callable[[Path], Iterator[_Entry]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_array,
    ".pt": _read_pickled,
    ".pth": _read_pickled,
}
