"""Dumps of Ascend Transformer Boost models, by msit (`tensors/`) or msprobe (`atb_dump_data/data/`).

`{device}_{pid}/{token}/{index}_{OpType}/{index}_{OpType}/.../` is a nested operation. Its files
`before/intensorN.bin` and `after/outtensorN.bin` hold lines `key=value` up to `$End=1`, then the values.
The tools store equal tensors once. The others link to that file: by path (a symbolic link), or by the
numbers of the operations (`data=5_0_1_outtensor0.bin`).
"""

import math
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError, Statistic
from assay.dumps.reading import Processes, find_processes, find_root, path_inside
from assay.files import UnreadableFileError, open_file, refuse_link
from assay.progress import counted
from assay.sites import CallSite, Site

# The tools limit each value to 50 characters.
_MAX_HEADER_BYTES = 4096
_MAGIC = b"$Version="
_DEVICE = re.compile(r"[0-9]{1,9}_[0-9]{1,18}")
_OPERATION = re.compile(r"([0-9]{1,9})_([A-Za-z].*)")
_TENSOR = re.compile(r"(in|out)tensor([0-9]{1,9})\.bin", re.IGNORECASE)
_ALIAS = re.compile(r"((?:[0-9]{1,9}_)+)((in|out)tensor[0-9]{1,9}\.bin)")
_SIZE = re.compile(r"[0-9]{1,18}")
# Statistics may also be `N/A` or complex.
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|inf|nan)")
_STATISTICS: Mapping[Statistic, str] = {
    "max": "max", "min": "min", "mean": "mean", "norm": "l2norm",
}  # fmt: skip

# Source: Mki::TensorDType of ascend-transformer-boost, the numbers of aclDataType.
_DTYPES = {
    "0": torch.float32, "1": torch.float16, "2": torch.int8, "3": torch.int32, "4": torch.uint8,
    "6": torch.int16, "9": torch.int64, "11": torch.float64, "12": torch.bool, "27": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Header:
    """The checked header of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None if it is not supported."""
    start: int
    """First byte of the values."""
    length: int | None
    """Size of the values in bytes; None if they are elsewhere or were not saved."""
    link: str
    """Name of the file that holds the values instead, or ""."""
    statistics: Mapping[Statistic, float]

    def require_length(self, length: int, file: Path) -> None:
        """Raise UnreadableFileError unless dims and dtype need `length` bytes."""
        if self.dtype and length != (expected := math.prod(self.shape) * self.dtype.itemsize):
            problem = f"$Object.data has {length:,} bytes, dims and dtype need {expected:,}"
            raise UnreadableFileError.of(file, problem)


class AtbReader:
    """Reader of dumps of Ascend Transformer Boost models: tensors and statistics.

    The path of an operation, such as `1_Attention.0_LinearOperation`, is its module. Weights are inputs.
    """

    name = "atb"

    def recognize(self, path: Path) -> bool:
        """Return True for a dump, a device folder, a token folder, and one tensor file."""
        return bool(_find_devices(path)) or _is_tensor_file(path)

    def open(self, path: Path) -> Dump:
        """Read the headers of all tensors."""
        devices = _find_devices(path)
        if not devices:
            return _open_file(self.name, path)
        find_root(path, devices)
        if len({device.name.partition("_")[0] for device, _ in devices}) < len(devices):
            names = (device.name for device, _ in devices)
            raise DumpError.of_several(path, "runs of one device", names)
        calls = [
            (rank, device, token, folder)
            for rank, (device, tokens) in enumerate(devices)
            for token in tokens
            for folder in _list_operations(token)
        ]
        found: list[DumpedTensor] = []
        damaged = DamagedFiles()
        for rank, device, token, folder in counted("reads headers", calls, "operations"):
            module = ".".join(folder.relative_to(token).parts)
            class_name = folder.name.partition("_")[2]
            at = CallSite(int(token.name), module, rank=rank)
            for port, file in _list_files(folder).items():
                with damaged.skipped():
                    tensor = _describe(device, file, Site(at, port))
                    found.append(replace(tensor, class_name=class_name))
        topologies = ", ".join(_list_topologies(devices[0][0]))
        provenance = {"topologies": topologies} if topologies else {}
        return Dump.of_found(self.name, path, found, damaged, provenance)


def _open_file(format_name: str, path: Path) -> Dump:
    """Open one tensor. Links may lead to other files of its device."""
    file = path.resolve()
    around = (folder for folder in file.parents if _DEVICE.fullmatch(folder.name))
    device = next(around, file.parent)
    tensor = _describe(device, file, Site(CallSite(0, ""), "output"))
    return Dump.of_found(format_name, path, [tensor])


def _find_devices(path: Path) -> Processes:
    patterns = ("*_*/", "tensors/*_*/", "data/*_*/", "*/tensors/*_*/", "*/data/*_*/")
    found = find_processes(path, patterns, lambda call: bool(_OPERATION.fullmatch(call.name)))
    return [one for one in found if one[1] and _DEVICE.fullmatch(one[0].name)]


def _is_tensor_file(path: Path) -> bool:
    try:
        with open_file(path) as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except UnreadableFileError:
        return False


def _list_topologies(device: Path) -> list[str]:
    """Return the graph names of a process. If there are several, the first run is a warm-up."""
    root, process = device.parent.parent, device.name.partition("_")[2]
    folders = (f"model/{process}", f"info/model/{process}", f"info/model/{device.name}")
    return sorted(file.stem for folder in folders for file in root.glob(f"{folder}/*.json"))


def _list_operations(token: Path) -> list[Path]:
    """Return the operation folders in order, inner operations before outer ones."""
    pending: list[tuple[tuple[float, ...], Path]] = [((), token)]
    found = []
    while pending:
        numbers, folder = pending.pop()
        found.append(((*numbers, math.inf), folder))
        for inner in folder.iterdir():
            name = _OPERATION.fullmatch(inner.name)
            if name and refuse_link(inner).is_dir():
                pending.append(((*numbers, int(name[1])), inner))
    return [folder for _, folder in sorted(found)]


def _list_files(operation: Path) -> dict[str, Path]:
    """Return the files of an operation by port.

    An input saved again after the call becomes `changed`. Outputs from before the call are ignored.
    """
    before, after = (
        {
            (name[1].lower(), int(name[2])): file
            for file in (operation / when).glob("*.bin")
            if (name := _TENSOR.fullmatch(file.name))
        }
        for when in ("before", "after")
    )
    found = {}
    for (kind, number), file in sorted({**after, **before}.items()):
        if kind == "in":
            found[f"input.{number}"] = file
            if file != after.get((kind, number), file):
                found[f"changed.{number}"] = after[kind, number]
    outputs = {number: file for (kind, number), file in sorted(after.items()) if kind == "out"}
    for number, file in outputs.items():
        found["output" if len(outputs) == 1 else f"output.{number}"] = file
    return found


def _describe(device: Path, file: Path, site: Site) -> DumpedTensor:
    header, _, values = _find_values(device, file)
    has_values = header.dtype is not None and values.length is not None
    return DumpedTensor(
        site,
        str(file.relative_to(device.parent)),
        partial(_read_values, device, file) if has_values else None,
        dtype=str(header.dtype or "").removeprefix("torch."),
        shape=header.shape,
        statistics=header.statistics,
    )


def _find_values(device: Path, file: Path) -> tuple[_Header, Path, _Header]:
    """Return the header of `file`, the file with its values, and the header of that file.

    Raises: UnreadableFileError if a link leaves the device folder, or links form a loop.
    """
    first: _Header | None = None
    visited = set()
    while file not in visited:
        visited.add(file)
        path_inside(device, os.path.relpath(file.parent, device))
        if file.is_symlink():
            file = _resolve(device, file, str(file.readlink()))
            continue
        header = _read_header(file)
        first = first or header
        if header.link in ("", file.name):  # msprobe links a filtered tensor to itself
            if header.length is not None:
                first.require_length(header.length, file)
            return first, file, header
        file = _resolve(device, file, header.link)
    raise UnreadableFileError.of(file, "its links form a loop")


def _resolve(device: Path, file: Path, link: str) -> Path:
    if alias := _ALIAS.fullmatch(link):
        folder = device / file.relative_to(device).parts[0]
        for number in alias[1].split("_")[:-1]:
            folder = next(folder.glob(f"{number}_*"), folder / number)
        return folder / ("before" if alias[3] == "in" else "after") / alias[2]
    if link.startswith("/"):  # a path on the machine that made the dump
        return Path(os.path.normpath(device / link.rpartition(f"/{device.name}/")[2]))
    return Path(os.path.normpath(file.parent / link))


def _read_header(file: Path) -> _Header:
    with open_file(file) as stream:
        fields, start = _split_fields(stream.read(_MAX_HEADER_BYTES), file)
        size_bytes = os.fstat(stream.fileno()).st_size
    dims = fields.get("dims", "-")
    shape = tuple(_parse_size("dims", dim, file) for dim in dims.split(",")) if dims else ()
    dtype = _DTYPES.get(fields.get("dtype", ""))
    statistics = {
        ours: float(fields[theirs])
        for ours, theirs in _STATISTICS.items()
        if _DECIMAL.fullmatch(fields.get(theirs, ""))
    }
    if "$Object.data" not in fields:
        return _Header(shape, dtype, start, None, fields.get("data", ""), statistics)
    data = fields["$Object.data"].partition(",")
    offset, length = (
        _parse_size("$Object.data", data[0], file),
        _parse_size("$Object.data", data[2], file),
    )
    total = _parse_size("$Object.Length", fields.get("$Object.Length", ""), file)
    stored = size_bytes - start
    if not offset + length == total == stored:
        problem = f"$Object.data ends at byte {offset + length:,}, $Object.Length is {total:,}"
        raise UnreadableFileError.of(file, f"{problem}, and the file holds {stored:,}")
    header = _Header(shape, dtype, start + offset, length, "", statistics)
    header.require_length(length, file)
    return header


def _split_fields(head: bytes, file: Path) -> tuple[dict[str, str], int]:
    """Return the fields of a header and the offset of its end."""
    fields: dict[str, str] = {}
    position = 0
    for line in head.split(b"\n")[:-1]:
        key, equals, value = line.decode("ascii", "backslashreplace").partition("=")
        if not equals or not line.isascii():
            raise UnreadableFileError.of(file, f"the line {key!r} does not belong to a header")
        position += len(line) + 1
        fields[key] = value
        if key == "$End":
            return fields, position
    raise UnreadableFileError.of(file, f"no $End in its first {len(head):,} bytes")


def _parse_size(key: str, text: str, file: Path) -> int:
    if not _SIZE.fullmatch(text):
        raise UnreadableFileError.of(file, f"{key} is not a size: {text!r}")
    return int(text)


def _read_values(device: Path, file: Path) -> Tensor:
    header, source, values = _find_values(device, file)
    if header.dtype is None or values.length is None:
        raise UnreadableFileError.of(file, "it holds no values of a supported dtype")
    if not values.length:
        return torch.empty(header.shape, dtype=header.dtype)
    try:
        with open_file(source) as stream:
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(memory, dtype=torch.uint8, count=values.length, offset=values.start)
    except ValueError as error:  # the file was truncated
        raise UnreadableFileError.of(source, error) from None
    if header.dtype is torch.bool:
        return data.ne(0).reshape(header.shape)
    if values.start % header.dtype.itemsize:
        data = data.clone()  # aligned
    return data.view(header.dtype).reshape(header.shape)
