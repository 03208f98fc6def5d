"""Dumps of msprobe (mindstudio-probe 26 and older).

`step{N}/rank{R}|proc{PID}/dump.json` lists the calls in the order in which they finished, with statistics
of every tensor. `dump_tensor_data/*.pt`, or `*.npy` of MindSpore, holds the values, unless the task is
`statistics`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError, Statistic
from assay.dumps.reading import load_tensor, path_inside, walk_values
from assay.files import UnreadableFileError, parse_json, read_text
from assay.sites import CallSite, Phase, Site, unwrapped_path

_INDEX = "dump.json"
_DATA = "dump_tensor_data"
# A mixed dump of a large model has 100,000 calls, 1 kB each.
_MAX_INDEX_BYTES = 1 << 30
_STEP = re.compile(r"step(\d+)")
_PROCESS = re.compile(r"(rank|proc)(\d*)")
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.([^.]+)\.(forward|backward|parameters_grad)\.(\d+)")
_OPERATION = re.compile(r"([A-Z]\w*)\.(.+)\.(\d+)\.(forward|backward)")
# These operations overwrite their first operand, which may be uninitialized memory.
_WRITES = re.compile(r"\w+_(?:__setitem__|(?:copy|fill|zero|index_put|index_copy|scatter)_)")
# MindSpore's names of the parameters of nn.Embedding, nn.LayerNorm and nn.BatchNorm2d, and PyTorch's.
_PARAMETERS = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}
_STATISTICS = {name: name.capitalize() for name in get_args(Statistic)}


@dataclass(frozen=True, slots=True)
class _Key:
    """The parsed key of one call."""

    module: str
    class_name: str
    phase: Phase
    call: int
    counter: str
    """The name that `call` counts the calls of."""
    operation: str = ""


_NO_CALLER = _Key("", "", "forward", 0, "")


class MsprobeReader:
    """Reader of msprobe's dumps: tensors and statistics, of modules (L0), operations (L1) or both."""

    name = "msprobe"

    def recognize(self, path: Path) -> bool:
        """Return True for a dump folder, a step folder, or a process folder."""
        return bool(_process_folders(path))

    def open(self, path: Path) -> Dump:
        """Read every dump.json."""
        found: list[DumpedTensor] = []
        damaged = DamagedFiles()
        tasks: set[str] = set()
        processes = _process_folders(path)
        _require_distinct(path, processes)
        for step, rank, folder in processes:
            index = _read_index(path_inside(path, str(folder.relative_to(path))))
            tasks.add(f"{index.get('task')} {index.get('level')}")
            for tensor, name in _read_calls(index["data"], step, rank, folder):
                file = path_inside(folder, f"{_DATA}/{name}") if name else None
                key = str((file or folder / tensor.key).relative_to(path))
                if file is not None and not file.is_file():
                    damaged.problems.append(f"{key} is missing")
                    continue
                load = partial(load_tensor, file, "its tensor") if file else None
                found.append(replace(tensor, key=key, load=load))
        return Dump.of_found(self.name, path, found, damaged, {"task": ", ".join(sorted(tasks))})


def _process_folders(path: Path) -> list[tuple[int, int, Path]]:
    found = []
    for folder in (path, *path.glob("proc*"), *path.glob("rank*"), *path.glob("step*/*")):
        has_index, has_data = (folder / _INDEX).is_file(), (folder / _DATA).is_dir()
        process = _PROCESS.fullmatch(folder.absolute().name)
        # The folder of one process may have been renamed.
        if (has_index or has_data) if process else (folder == path and has_index and has_data):
            step = _STEP.fullmatch(folder.absolute().parent.name)
            rank = int(process[2] or 0) if process and process[1] == "rank" else 0
            found.append((int(step[1]) if step else 0, rank, folder))
    return sorted(found)


def _require_distinct(path: Path, processes: list[tuple[int, int, Path]]) -> None:
    """Raise DumpError if two runs wrote into one folder: processes of the same step and rank."""
    for (step, rank, one), (next_step, next_rank, other) in pairwise(processes):
        if (step, rank) == (next_step, next_rank):
            what = f"{one.name} and {other.name}, both step {step}, rank {rank}"
            raise DumpError(f"{path} holds {what}: name the folder of one of them")


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
    """Yield every tensor with its file name, "" if it has no file."""
    keys = {text: _parse_key(text, folder) for text in data}
    counts = Counter(key.counter for key in keys.values() if not key.operation)
    num_passes = _count_passes(n for counter, n in counts.items() if " " not in counter)
    numbers = _number_irregular_calls(keys, counts, num_passes)
    is_training = any(key.phase == "backward" for key in keys.values())
    callers = _read_callers(folder) if any(key.operation for key in keys.values()) else {}
    num_operations: Counter[tuple[str, str]] = Counter()
    for text, key in keys.items():
        caller, called_by = key, text
        if key.operation:
            called_by = callers.get(text, "")
            caller = _parse_key(called_by, folder) if called_by else _NO_CALLER
        number, call = numbers.get(called_by) or _split_call(
            caller.call, counts[caller.counter], num_passes
        )
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
            counter = called_by, key.counter
            prefix = f"op.{num_operations[counter]}.{key.operation}."
            num_operations[counter] += 1
        value = data[text]
        if not isinstance(value, dict):
            raise UnreadableFileError.of(folder / _INDEX, f"{text} is not a table")
        ports = _ports_of_gradients if "parameters_grad" in key.counter else _ports_of
        is_write = _WRITES.fullmatch(key.operation) is not None
        for port, entry in ports(value):
            if is_write and port == "input.0":
                continue
            tensor = _parse_tensor(Site(at, prefix + port), f"{text}.{port}", entry, folder, text)
            yield replace(tensor, class_name=key.class_name), str(entry.get("data_name") or "")


def _count_passes(calls: Iterable[int]) -> int:
    """Return the number of passes: the most common number of calls, because most modules run once."""
    counts = Counter(calls)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def _split_call(call: int, num_calls: int, num_passes: int) -> tuple[int, int]:
    """Return the pass of a call and its number within the pass.

    >>> _split_call(5, num_calls=6, num_passes=3)  # a module that is called twice in each pass
    (2, 1)
    """
    in_each_pass, rest = divmod(num_calls, num_passes) if num_passes else (0, 1)
    return divmod(call, in_each_pass) if in_each_pass and not rest else (call, 0)


def _number_irregular_calls(
    keys: Mapping[str, _Key], counts: Mapping[str, int], num_passes: int
) -> dict[str, tuple[int, int]]:
    """Return pass and number for calls of modules that skip passes, such as experts.

    Such a call belongs to the pass of the surrounding regular modules.
    """
    forward = {
        text: key.module
        for text, key in keys.items()
        if key.phase == "forward" and not key.operation
    }
    regular = [
        module for text, module in forward.items() if counts[keys[text].counter] == num_passes
    ]
    if not regular:
        return {}
    first, last = regular[0], list(dict.fromkeys(regular))[-1]
    finished: Counter[str] = Counter()
    calls: Counter[tuple[str, int]] = Counter()
    order = {module: at for at, module in enumerate(dict.fromkeys(forward.values()))}
    found = {}
    for text, module in forward.items():
        if counts[keys[text].counter] % num_passes or "experts" in module.split("."):
            is_before = order[module] < order[first]
            number = finished[last] if is_before else finished[first] - 1
            found[text] = number, calls[module, number]
            calls[module, number] += 1
        finished[module] += 1
    return found


def _read_callers(folder: Path) -> dict[str, str]:
    """Return the enclosing module call of each call; empty if the dump does not record it."""
    path = path_inside(folder, "construct.json")
    table = parse_json(read_text(path, _MAX_INDEX_BYTES), path) if path.is_file() else {}
    table = table if isinstance(table, dict) else {}
    found = {}
    for text in table:
        seen = {text}
        caller = _first(table[text])
        while isinstance(caller, str) and not _MODULE.fullmatch(caller):
            if caller in seen:
                raise UnreadableFileError.of(path, f"{caller} is its own caller")
            seen.add(caller)
            caller = _first(table.get(caller))
        if isinstance(caller, str):
            found[text] = caller
    return found


def _first(value: object) -> object:
    """Return the first item of a list (None if it is empty), and any other value unchanged."""
    return (value or [None])[0] if isinstance(value, list) else value


def _parse_key(text: str, folder: Path) -> _Key:
    if found := _MODULE.fullmatch(text):
        module, class_name, kind, call = found.groups()
        phase: Phase = "forward" if kind == "forward" else "backward"
        counter = module if kind == "forward" else f"{module} {kind}"
        return _Key(unwrapped_path(module), class_name, phase, int(call), counter)
    if found := _OPERATION.fullmatch(text):
        prefix, name, call, direction = found.groups()
        phase = "forward" if direction == "forward" else "backward"
        operation = f"{prefix}.{name}".replace(".", "_")
        return _Key("", prefix, phase, int(call), f"op {operation} {phase}", operation)
    raise UnreadableFileError.of(folder / _INDEX, f"unknown key {text}")


def _ports_of_gradients(call: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, entry in call.items():
        yield from _walk(f"parameter.{_PARAMETERS.get(name, name)}", _first(entry))


def _ports_of(call: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # In backward, msprobe's `input` is the gradient of the forward's output.
    inputs, outputs = ("output", "input") if "input" in call else ("input", "output")
    for name in ("input", "input_args", "input_kwargs"):
        yield from _walk(inputs, call.get(name))
    yield from _walk(outputs, call.get("output"))
    parameters = call.get("parameters")
    if isinstance(parameters, dict):
        parameters = {_PARAMETERS.get(name, name): one for name, one in parameters.items()}
    yield from _walk("parameter", parameters)


def _walk(port: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    while port == "output" and isinstance(value, list) and len(value) == 1:
        value = value[0]
    for name, entry in walk_values(port, value, _is_entry):
        if _is_tensor(entry):
            yield name, entry


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and ("type" in value or _is_tensor(value))


def _is_tensor(entry: Mapping[str, Any]) -> bool:
    return "shape" in entry and "dtype" in entry


def _parse_tensor(
    site: Site, key: str, entry: Mapping[str, Any], folder: Path, call: str
) -> DumpedTensor:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise UnreadableFileError.of(folder / _INDEX, f"{call}: {shape!r} is not a shape")
    numbers = {ours: entry.get(theirs) for ours, theirs in _STATISTICS.items()}
    try:
        statistics = {
            name: float(one) for name, one in numbers.items() if isinstance(one, int | float)
        }
    except OverflowError:
        raise UnreadableFileError.of(folder / _INDEX, f"{call}: a statistic is too large") from None
    return DumpedTensor(
        site,
        key,
        dtype=str(entry.get("dtype", "")).removeprefix("torch.").lower(),  # MindSpore: Float32
        shape=tuple(shape),
        statistics=statistics,
    )
