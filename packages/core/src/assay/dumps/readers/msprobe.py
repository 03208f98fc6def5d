"""Dumps of msprobe (mindstudio-probe 26 and older).

`step{N}/rank{R}|proc{PID}/dump.json` lists the calls in the order in which they finished, with the
statistics of every tensor; `dump_tensor_data/*.pt` holds the values, unless the task is `statistics`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from assay.dumps.passes import count_passes, split_call
from assay.dumps.paths import path_inside
from assay.dumps.protocol import Dump, DumpedTensor, DumpError, Statistic
from assay.files import UnreadableFileError, parse_json, read_text
from assay.models.weight_files.pickled import load_objects, require_stored
from assay.sites import CallSite, Phase, Site, unwrapped_path

_INDEX = "dump.json"
_DATA = "dump_tensor_data"
# A mixed dump of a large model has 100,000 calls, 1 kB each.
_MAX_INDEX_BYTES = 1 << 30
_STEP = re.compile(r"step(\d+)")
_PROCESS = re.compile(r"(rank|proc)(\d*)")
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.([^.]+)\.(forward|backward|parameters_grad)\.(\d+)")
_OPERATION = re.compile(r"([A-Z]\w*)\.(.+)\.(\d+)\.(forward|backward)")
# Names in dump.json, by ours.
_STATISTICS = {name: name.capitalize() for name in get_args(Statistic)}


@dataclass(frozen=True, slots=True)
class _Key:
    """The parsed key of one call. counter: what `call` is counted over."""

    module: str
    class_name: str
    phase: Phase
    call: int
    counter: str
    operation: str = ""


_NO_CALLER = _Key("", "", "forward", 0, "")


class MsprobeReader:
    """Reader of msprobe's dumps: tensors and statistics, of modules (L0), operations (L1) or both."""

    name = "msprobe"

    def recognize(self, path: Path) -> bool:
        """Return True for a dump folder, one of its steps, or the folder of one process."""
        return bool(_process_folders(path))

    def open(self, path: Path) -> Dump:
        """Read every dump.json."""
        tensors: list[DumpedTensor] = []
        files: dict[str, Path] = {}
        problems: list[str] = []
        tasks: set[str] = set()
        for step, rank, folder in _process_folders(path):
            index = _read_index(folder)
            tasks.add(f"{index.get('task')} {index.get('level')}")
            for tensor, name in _read_calls(index["data"], step, rank, folder):
                file = path_inside(folder, f"{_DATA}/{name}") if name else None
                key = str((file or folder / tensor.key).relative_to(path))
                if file is not None and not file.is_file():
                    problems.append(f"{key} is missing")
                    continue
                if file is not None:
                    files[key] = file
                tensors.append(
                    replace(tensor, key=key, order=len(tensors), has_values=file is not None)
                )

        def read(tensor: DumpedTensor) -> Tensor:
            file = files[tensor.key]
            value = load_objects(file)
            if not isinstance(value, Tensor):
                raise UnreadableFileError.of(file, f"it holds a {type(value).__name__}, no tensor")
            return require_stored(file, "its tensor", value)

        provenance = {"task": ", ".join(sorted(tasks))}
        return Dump(
            format=self.name, path=path, tensors=tensors, read=read, provenance=provenance,
            problems=problems,
        )  # fmt: skip


def _process_folders(path: Path) -> list[tuple[int, int, Path]]:
    """Return step, rank and folder of every process whose files `path` holds."""
    found = []
    for folder in (path, *path.glob("proc*"), *path.glob("rank*"), *path.glob("step*/*")):
        process = _PROCESS.fullmatch(folder.name)
        if process and ((folder / _INDEX).is_file() or (folder / _DATA).is_dir()):
            step = _STEP.fullmatch(folder.parent.name)
            rank = int(process[2] or 0) if process[1] == "rank" else 0
            found.append((int(step[1]) if step else 0, rank, folder))
    return sorted(found)


def _read_index(folder: Path) -> dict[str, Any]:
    path = path_inside(folder, _INDEX)
    if not path.is_file():
        raise DumpError(f"{folder} has no {_INDEX}: the run ended before msprobe's stop()")
    index = parse_json(read_text(path, _MAX_INDEX_BYTES), path)
    if not isinstance(index, dict) or not isinstance(index.get("data"), dict):
        raise UnreadableFileError.of(path, "it has no table `data`")
    return index


def _read_calls(
    data: Mapping[str, Any], step: int, rank: int, folder: Path
) -> Iterator[tuple[DumpedTensor, str]]:
    """Yield every tensor with the name of its file, "" if there is none."""
    keys = {text: _parse_key(text, folder) for text in data}
    counts = Counter(key.counter for key in keys.values() if not key.operation)
    num_passes = count_passes(n for counter, n in counts.items() if " " not in counter)
    is_training = any(key.phase == "backward" for key in keys.values())
    callers = _read_callers(folder) if any(key.operation for key in keys.values()) else {}
    num_operations: Counter[tuple[str, str]] = Counter()
    for text, key in keys.items():
        caller = keys.get(callers.get(text, ""), _NO_CALLER) if key.operation else key
        number, call = split_call(caller.call, counts[caller.counter], num_passes)
        at = CallSite(
            step if is_training else number,
            caller.module,
            call,
            key.phase,
            micro_batch=number if is_training else step,
            rank=rank,
        )
        prefix = ""
        if key.operation:
            counter = callers.get(text, ""), key.operation
            prefix = f"op.{num_operations[counter]}.{key.operation}."
            num_operations[counter] += 1
        value = data[text]
        if not isinstance(value, dict):
            raise UnreadableFileError.of(folder / _INDEX, f"{text} is no table")
        ports = _ports_of_gradients if "parameters_grad" in key.counter else _ports_of
        for port, entry in ports(value):
            stored = _parse_tensor(entry, folder, text)
            site = Site(at, prefix + port)
            name = str(entry.get("data_name") or "")
            yield replace(stored, site=site, key=f"{text}.{port}", class_name=key.class_name), name


def _read_callers(folder: Path) -> dict[str, str]:
    """Return the key of the module call around each call; empty if the dump has no such table."""
    path = path_inside(folder, "construct.json")
    table = parse_json(read_text(path, _MAX_INDEX_BYTES), path) if path.is_file() else {}
    found = {}
    for text, parent in table.items() if isinstance(table, dict) else ():
        name = parent[0] if isinstance(parent, list) and parent else parent
        while isinstance(name, str) and not _MODULE.fullmatch(name):
            name = table.get(name)
        if isinstance(name, str):
            found[text] = name
    return found


def _parse_key(text: str, folder: Path) -> _Key:
    if found := _MODULE.fullmatch(text):
        module, class_name, kind, call = found.groups()
        phase: Phase = "forward" if kind == "forward" else "backward"
        counter = f"{module}" if kind == "forward" else f"{module} {kind}"
        return _Key(unwrapped_path(module), class_name, phase, int(call), counter)
    if found := _OPERATION.fullmatch(text):
        prefix, name, call, direction = found.groups()
        phase = "forward" if direction == "forward" else "backward"
        operation = f"{prefix}.{name}".replace(".", "_")
        return _Key("", prefix, phase, int(call), f"op {operation} {phase}", operation)
    raise UnreadableFileError.of(folder / _INDEX, f"unknown key {text}")


def _ports_of(call: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield port and entry of every tensor of a call."""
    # In backward, msprobe's `input` is the gradient of the forward's output.
    inputs, outputs = ("output", "input") if "input" in call else ("input", "output")
    for name in ("input", "input_args"):
        yield from _walk(inputs, call.get(name))
    yield from _walk(inputs, call.get("input_kwargs"))
    output: Any = call.get("output")
    if isinstance(output, list) and len(output) == 1 and outputs == "output":
        output = output[0]
    yield from _walk(outputs, output)
    yield from _walk("parameter", call.get("parameters"))


def _ports_of_gradients(call: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield port and entry of the gradient of every parameter of a module."""
    for name, entry in call.items():
        yield from _walk(f"parameter.{name}", entry[0] if isinstance(entry, list) else entry)


def _walk(port: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk(f"{port}.{number}", item)
    elif isinstance(value, dict) and value.get("type") == "torch.Tensor":
        yield port, value
    elif isinstance(value, dict) and "type" not in value:
        for name, item in value.items():
            yield from _walk(f"{port}.{name}", item)


def _parse_tensor(entry: Mapping[str, Any], folder: Path, key: str) -> DumpedTensor:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise UnreadableFileError.of(folder / _INDEX, f"{key}: {shape!r} is no shape")
    statistics = {
        ours: float(entry[theirs])
        for ours, theirs in _STATISTICS.items()
        if isinstance(entry.get(theirs), int | float)
    }
    return DumpedTensor(
        Site(CallSite(0, ""), ""),
        key,
        dtype=str(entry.get("dtype", "")).removeprefix("torch."),
        shape=tuple(shape),
        statistics=statistics,
    )
