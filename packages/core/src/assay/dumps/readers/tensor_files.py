"""Loose tensor files: safetensors, .npy, .npz, and .pt or .pth with a tensor or tensors by name.

They record no module calls. The reader guesses module and port from the name of each tensor.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from assay.dumps.protocol import UNKNOWN_SITE, DamagedFiles, Dump, DumpedTensor
from assay.dumps.reading import (
    list_archive,
    map_array,
    natural_order,
    path_inside,
    read_archived,
    require_values,
    walk_values,
)
from assay.files import UnreadableFileError
from assay.files.safetensors import read_header
from assay.models.stored_tensors import dtype_of, load_objects, map_tensor
from assay.sites import CallSite, Site, unwrapped_path

_MAX_FOLDER_DEPTH = 3
_MAX_NESTING = 8
# `a.b.output`, `a.b.output.1`, `a.b.input.0`, `a.b.input.hidden_states`. A module may be called `output`,
# so only numbers may follow it.
_CALL = re.compile(r"(?:(.+)\.)?(input(?:\.[A-Za-z_]\w*)?(?:\.\d+)*|output(?:\.\d+)*)")
_TABLES = (".npz", ".pt", ".pth")
# Arguments of a model, as libraries name them: inputs, although nothing in the name says so.
_ARGUMENTS = ("input_ids", "decoder_input_ids", "attention_mask", "position_ids")
_PARAMETER = re.compile(r"(?:(.+?)\.)?(?:parameter\.)?((?:weight|bias)(?:_\w+)?)")


class TensorFilesReader:
    """Reader of one tensor file, or of a folder of tensor files."""

    name = "tensors"

    def recognize(self, path: Path) -> bool:
        """Return True if `path` is a tensor file, or a folder of nothing else."""
        if not path.is_dir():
            return path.is_file() and path.suffix in _READERS
        files = _walk_files(path, _MAX_FOLDER_DEPTH)
        first = next(files, None)
        return first is not None and all(file.suffix in _READERS for file in (first, *files))

    def open(self, path: Path) -> Dump:
        """List the tensors of every file."""
        folder = path if path.is_dir() else path.parent
        files = [path]
        if path.is_dir():
            files = sorted(_walk_files(path, _MAX_FOLDER_DEPTH), key=natural_order)
        found: list[tuple[Path, DumpedTensor]] = []
        damaged = DamagedFiles()
        for file in files:
            name = file.relative_to(folder)
            path_inside(folder, str(name))
            with damaged.skipped():
                found += [(name, one) for one in _READERS[file.suffix](file)]
        sites = _name_sites([(file, tensor.key) for file, tensor in found])
        dump = Dump.of_found(
            self.name,
            path,
            (
                replace(tensor, site=site, key=f"{file}:{tensor.key}".removesuffix(":"))
                for site, (file, tensor) in zip(sites, found, strict=True)
            ),
            damaged=damaged,
            provenance={"names": "modules are guessed from the names of tensors"},
        )
        # A table keeps the order in which its tensors were added.
        return replace(dump, is_ordered=path.suffix in _TABLES and path.is_file())


def _walk_files(folder: Path, max_depth: int) -> Iterator[Path]:
    """Yield the visible entries of a folder and, up to `max_depth` levels deep, of its subfolders."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if max_depth and path.is_dir() and not path.is_symlink():
            yield from _walk_files(path, max_depth - 1)
        else:
            yield path


def _name_sites(names: Sequence[tuple[Path, str]]) -> list[Site]:
    """Return the address of each tensor, from its file and its name in the file ("" for none).

    The file name precedes a tensor name that occurs in several files.
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
    elif name in _ARGUMENTS:
        module, port = "", f"input.{name}"
    elif found := _CALL.fullmatch(name):
        module, port = found[1] or "", found[2]
    return Site(CallSite(0, unwrapped_path(module)), port)


def _read_safetensors(file: Path) -> Iterator[DumpedTensor]:
    for stored in sorted(read_header(file), key=lambda one: natural_order(one.name)):
        load = partial(map_tensor, stored)
        dtype, shape = dtype_of(stored), stored.shape
        yield DumpedTensor(UNKNOWN_SITE, stored.name, load, dtype=dtype, shape=shape)


def _read_array(file: Path) -> Iterator[DumpedTensor]:
    yield DumpedTensor.of_values(UNKNOWN_SITE, "", partial(map_array, file), map_array(file))


def _read_archive(file: Path) -> Iterator[DumpedTensor]:
    for name, of_array, shape in list_archive(file):
        load, dtype = partial(read_archived, file, name), str(of_array).removeprefix("torch.")
        yield DumpedTensor(UNKNOWN_SITE, name, load, dtype=dtype, shape=shape)


def _read_pickled(file: Path) -> Iterator[DumpedTensor]:
    found = _map_objects(file)
    if not found:
        raise UnreadableFileError.of(file, "it holds no tensors")
    for name, tensor in found.items():
        load = partial(_load_object, file, name)
        yield DumpedTensor.of_values(UNKNOWN_SITE, name, load, tensor)


def _load_object(file: Path, name: str) -> Tensor:
    found = _map_objects(file)
    if name not in found:
        raise UnreadableFileError.of(file, f"it no longer holds {name or 'a tensor'}")
    return found[name]


def _map_objects(file: Path) -> dict[str, Tensor]:
    """Return the tensors that `torch.save` wrote, by name; a single tensor has the name ""."""
    try:
        return _map_version(file, file.stat().st_mtime_ns)
    except OSError as error:
        raise UnreadableFileError.of(file, error) from None


@lru_cache(maxsize=4)  # both sides of a comparison read such a file tensor by tensor
def _map_version(file: Path, _modified_ns: int) -> dict[str, Tensor]:
    found = walk_values(
        "", load_objects(file), lambda value: isinstance(value, Tensor), _MAX_NESTING
    )
    return {name: require_values(file, name or "it", tensor) for name, tensor in found}


_READERS: Mapping[str, Callable[[Path], Iterator[DumpedTensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_array,
    ".npz": _read_archive,
    ".pt": _read_pickled,
    ".pth": _read_pickled,
}
