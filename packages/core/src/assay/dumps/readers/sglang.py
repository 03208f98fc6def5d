"""Dumps of SGLang's dumper (also in vLLM and Megatron), and of SGLang's older hooks.

The dumper writes one file per tensor, `step=0___rank=0___dump_index=7___name=NAME___KEY=VALUE.pt`, with
the keys `value` and `meta`. The hooks write one file per pass and rank,
`TP0_PP0_Rank0_pid123/Pass00000.pt`, with outputs by module name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError
from assay.dumps.reading import path_inside, require_dense, require_inside, require_values
from assay.files import UnreadableFileError
from assay.foreign_text import one_line
from assay.models.stored_tensors import load_objects
from assay.progress import counted
from assay.sites import CallSite, Phase, Site, unwrapped_path

_SEPARATOR = re.compile(r"___(?=[A-Za-z]\w*=)")
_NUMBER = re.compile(r"[0-9]{1,9}")
_HOOKED = re.compile(r"non_intrusive__(?:(.+)\.)?(inputs\.[^.]+|output)((?:\.[^.]+)*)")
# The dumper records these arguments of the model without a module.
_MODEL_INPUTS = (
    "input_ids", "positions", "seq_lens", "req_pool_indices", "rids", "position_ids", "cu_seqlens_q",
    "cu_seqlens_kv",
)  # fmt: skip
_PARALLEL_INFO = ("sglang_parallel_info", "megatron_parallel_info")
_PROCESS = re.compile(r"TP[0-9]+_PP[0-9]+_Rank([0-9]{1,9})_pid[0-9]+")
_PASS = re.compile(r"Pass([0-9]{1,9})\.pt")
_BATCH = ".forward_batch_info."
_PROXY = ".pp_proxy_tensors."
_MAX_FACT_CHARACTERS = 200


class SglangReader:
    """Reader of the dumps of SGLang's dumper and of SGLang's older hooks.

    A name that the user chose becomes a module with one output: `layers.3.NAME` within layer 3.
    """

    name = "sglang"

    def recognize(self, path: Path) -> bool:
        """Return True for an experiment, a rank folder, and their parent folder."""
        return bool(_find_experiments(path) or _find_processes(path))

    def open(self, path: Path) -> Dump:
        """Read the name of every file, and its dtype, shape and layout."""
        experiments = _find_experiments(path)
        if len(experiments) > 1:
            names = (folder.name for folder in experiments)
            raise DumpError.of_several(path, "experiments", names)
        facts: dict[str, str] = {}
        processes = [] if experiments else _find_processes(path)
        if len({rank for rank, _ in processes}) < len(processes):
            names = (folder.name for _, folder in processes)
            raise DumpError.of_several(path, "runs of one rank", names)
        for folder in (*experiments, *(folder for _, folder in processes)):
            require_inside(path, folder)
        damaged = DamagedFiles()
        if experiments:
            found = list(_read_experiment(experiments[0], facts, damaged))
        else:
            found = list(_read_passes(processes, damaged))
        # The dumper records inputs before a call. All tensors of a call get one position.
        finished = {tensor.site.at: position for position, tensor in enumerate(found)}
        found.sort(key=lambda one: finished[one.site.at])
        return Dump.of_found(self.name, path, found, damaged, facts)


def _find_experiments(path: Path) -> list[Path]:
    path = path.resolve()
    for folders in ([path], sorted(path.glob("*/"))):
        found = [folder for folder in folders if any(map(_parse_file_name, folder.glob("*=*.pt")))]
        if found:
            return found
    return []


def _parse_file_name(file: Path) -> dict[str, str]:
    """Return the keys in a file name; none if the dumper did not write the file.

    >>> _parse_file_name(Path("step=0___rank=1___dump_index=7___name=a=b.c.pt"))
    {'step': '0', 'rank': '1', 'dump_index': '7', 'name': 'a=b.c'}
    """
    parts = [part.partition("=") for part in _SEPARATOR.split(file.stem)]
    # Early versions wrote `forward_pass_id`.
    keys = {key.replace("forward_pass_id", "step"): value for key, _, value in parts}
    numbers = (keys.get("step", ""), keys.get("rank", "0"), keys.get("dump_index", ""))
    return keys if "name" in keys and all(map(_NUMBER.fullmatch, numbers)) else {}


def _read_experiment(
    folder: Path, facts: dict[str, str], damaged: DamagedFiles
) -> Iterator[DumpedTensor]:
    """Yield the tensors of all files. Short texts go to `facts`."""
    files = [(keys, file) for file in folder.glob("*=*.pt") if (keys := _parse_file_name(file))]
    files.sort(key=lambda one: [int(one[0].get(key, 0)) for key in ("step", "rank", "dump_index")])
    counts: Counter[Site] = Counter()
    for keys, file in counted(f"reads {folder.name}", files, "files"):
        module, port, phase = _parse_name(keys["name"], keys.get("layer_id", ""))
        at = CallSite(int(keys["step"]), module, 0, phase, rank=int(keys.get("rank", 0)))
        found: list[DumpedTensor] = []
        with damaged.skipped():
            found = list(_read_file(path_inside(folder, file.name), keys, Site(at, port), facts))
        # A damaged file counts as a call: later calls keep their numbers.
        for site in {tensor.site for tensor in found} or {Site(at, port)}:
            counts[site] += 1
        yield from (tensor.moved(call=counts[tensor.site] - 1) for tensor in found)


def _read_file(
    file: Path, keys: Mapping[str, str], site: Site, facts: dict[str, str]
) -> Iterator[DumpedTensor]:
    """Yield the tensors of one file. A single tensor gets the address `site`."""
    content = load_objects(file)
    # The first versions wrote the bare value.
    wrapped = isinstance(content, dict) and {"value", "meta"} <= content.keys()
    meta = _contents(_contents(content).get("meta")) if wrapped else {}
    value = _contents(content)["value"] if wrapped else content
    value_key = ("value",) if wrapped else ()
    at, world_rank = site.at, meta.get("world_rank")
    if "rank" not in keys and isinstance(world_rank, int):
        at = replace(at, rank=world_rank)
    dims = meta.get("dims")
    layout = one_line(dims) if isinstance(dims, str) else ""
    items = value if isinstance(value, list) else [value]
    if texts := [one_line(item) for item in items if isinstance(item, str)]:
        text = ", ".join(texts)
        if len(text) <= _MAX_FACT_CHARACTERS:
            facts.setdefault(keys["name"], text)
    for inner, tensor in _tensors_in(value).items():
        port = Site(at, site.port + _suffix(inner))
        found = _describe(port, file.name + _suffix(inner), file, tensor, value_key + inner)
        yield replace(found, layout=layout, axes=_read_axes(meta))


def _read_axes(meta: Mapping[object, object]) -> dict[str, tuple[int, int]]:
    """Return the rank's index along each mesh axis, and the size of the axis."""
    facts: dict[object, object] = {}
    for name in _PARALLEL_INFO:
        facts |= _contents(meta.get(name))
    axes = {}
    for key, place in facts.items():
        axis, _, kind = str(key).rpartition("_")
        size = facts.get(f"{axis}_size")
        if axis and kind == "rank" and isinstance(place, int) and isinstance(size, int):
            axes[axis] = place, size
    return axes


def _parse_name(name: str, layer: str) -> tuple[str, str, Phase]:
    """Parse a name into module, port and phase.

    >>> _parse_name("grad__non_intrusive__model.layers.0.inputs.hidden_states", "0")
    ('model.layers.0', 'input.hidden_states', 'backward')
    """
    phase: Phase = "backward" if name.startswith("grad__") else "forward"
    name = name.removeprefix("grad__")
    if name.startswith("param__"):
        module, _, parameter = name.removeprefix("param__").rpartition(".")
        return unwrapped_path(module), f"parameter.{parameter}", phase
    if hooked := _HOOKED.fullmatch(name):
        module, port, inner = hooked.groups(default="")
        return unwrapped_path(module), port.replace("inputs.", "input.", 1) + inner, phase
    if name in _MODEL_INPUTS:
        return "", f"input.{name}", phase
    return f"layers.{layer}.{name}" if layer else name, "output", phase


def _contents(value: object) -> Mapping[object, object]:
    """Return the items of a dict, list or tuple by key; an empty mapping for other values."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def _tensors_in(value: object) -> dict[tuple[object, ...], Tensor]:
    """Return `value` if it is a tensor, else the tensors directly in it, by key."""
    if isinstance(value, Tensor):
        return {(): value}
    return {
        (key,): one
        for key, one in _contents(value).items()
        if isinstance(one, Tensor) and isinstance(key, str | int)
    }


def _suffix(keys: tuple[object, ...]) -> str:
    return "".join(f".{one_line(str(key))}" for key in keys)


def _describe(
    site: Site, key: str, file: Path, value: Tensor, keys: tuple[object, ...]
) -> DumpedTensor:
    """Describe a tensor, which `keys` lead to in `file`."""
    load = partial(_load, file, key, keys)
    return DumpedTensor.of_values(site, key, load, require_dense(file, key, value))


def _load(file: Path, name: str, keys: tuple[object, ...]) -> Tensor:
    value = load_objects(file)
    for key in keys:
        value = _contents(value).get(key)
    return require_values(file, f"the entry of {name}", value)


def _find_processes(path: Path) -> list[tuple[int, Path]]:
    """Return rank and folder of each process that the older hooks recorded."""
    path = path.resolve()
    folders = (path, *path.glob("TP*_PP*"))
    return sorted(
        (int(process[1]), folder)
        for folder in folders
        if (process := _PROCESS.fullmatch(folder.name)) and any(folder.glob("Pass*.pt"))
    )


def _read_passes(
    processes: list[tuple[int, Path]], damaged: DamagedFiles
) -> Iterator[DumpedTensor]:
    for rank, folder in processes:
        files = {file: _PASS.fullmatch(file.name) for file in folder.glob("Pass*.pt")}
        passes = sorted((int(found[1]), file) for file, found in files.items() if found)
        for number, file in counted(f"reads {folder.name}", passes, "passes"):
            with damaged.skipped():
                yield from _read_pass(path_inside(folder, file.name), rank, number)


def _read_pass(file: Path, rank: int, number: int) -> Iterator[DumpedTensor]:
    table = _contents(load_objects(file))
    outputs = {name: value for name, value in table.items() if isinstance(name, str)}
    if not outputs:
        raise UnreadableFileError.of(file, "it holds no outputs by module name")
    for at, port, name in _parse_outputs(list(outputs), number):
        for keys, tensor in _tensors_in(outputs[name]).items():
            site = Site(replace(at, rank=rank), port + _suffix(keys))
            key = f"{file.parent.name}/{file.name} {one_line(name)}{_suffix(keys)}"
            yield _describe(site, key, file, tensor, (name, *keys))


def _parse_outputs(names: list[str], number: int) -> Iterator[tuple[CallSite, str, str]]:
    """Yield call, port and name of each output in the file of pass `number`.

    The hooks write a file when the inner model ends, before they add its output. That output and later ones,
    such as the logits, begin the next file.
    """
    inner = next((name.partition(_BATCH)[0] for name in names if _BATCH in name), "")
    step = max(0, number - 1)
    for name in names:
        if not inner or (name.startswith(f"{inner}.") and _PROXY not in name):
            step = number
        module, port = name, "output"
        if _BATCH in name:
            module, port = "", f"input.{name.partition(_BATCH)[2]}"
        elif _PROXY in name:
            module, port = inner, f"output.{name.partition(_PROXY)[2]}"
        yield CallSite(step, unwrapped_path(one_line(module))), one_line(port), name
