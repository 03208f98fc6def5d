"""Dumps of PyTorch models by msit (`msit_llm`).

`msit_dump_{time}/torch_tensors/{device}_{pid}/` is one process. `model_tree.json` lists the modules,
`{token}/{module}/` holds the tensors of a call or their `statistics.csv`, and `weights/` the parameters.
`{token}/{module}.{api}[.k]/` is a torch function that the module called.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from assay.dumps.protocol import UNKNOWN_SITE, DamagedFiles, Dump, DumpedTensor, Statistic
from assay.dumps.reading import (
    Processes,
    find_processes,
    find_root,
    load_tensor,
    natural_order,
    path_inside,
    require_dense,
)
from assay.files import UnreadableFileError, read_json_object, read_text
from assay.models.stored_tensors import load_objects
from assay.progress import counted
from assay.sites import CallSite, Site, unwrapped_path

_TREE = "model_tree.json"
_STATISTICS_FILE = "statistics.csv"
_CONTENT = "its content"
_TENSOR = re.compile(r"(input|output)((?:_[0-9]{1,9})*)")
_NUMBERED = re.compile(r"(.+)\.([0-9]{1,9})")
_COLUMNS: Mapping[Statistic, str] = {"max": "Max", "min": "Min", "mean": "Mean", "norm": "L2Norm"}


@dataclass(frozen=True, slots=True)
class _CallFolder:
    """A folder with the tensors of one call."""

    folder: Path
    token: int
    module: str
    """The tool's name, which begins with `root`."""
    prefix: str = ""


class MsitTorchReader:
    """Reader of msit's dumps of PyTorch models: tensors, statistics and weights.

    The tool keeps only the last call of each module per token. Each process is a rank.
    """

    name = "msit"

    def recognize(self, path: Path) -> bool:
        """Return True for a dump, its parent folder, a process folder, and a token folder."""
        return bool(_find_processes(path))

    def open(self, path: Path) -> Dump:
        """Read the module trees, and the dtype and shape of each tensor."""
        processes = _find_processes(path)
        root = find_root(path, processes)
        found: list[DumpedTensor] = []
        damaged = DamagedFiles()
        for rank, (folder, tokens) in enumerate(processes):
            classes = _read_tree(folder)
            calls = [call for token in tokens for call in _list_calls(token, classes)]
            tensors = list(_read_weights(folder, calls[0].token if calls else 0, damaged))
            for call in counted(f"reads {folder.name}", calls, "calls"):
                tensors += _read_call(root, call, damaged)
            for tensor in tensors:
                at, class_name = tensor.site.at, classes.get(tensor.site.at.module, "")
                module = unwrapped_path(at.module.removeprefix("root").removeprefix("."))
                site = Site(replace(at, module=module, rank=rank), tensor.site.port)
                found.append(replace(tensor, site=site, class_name=class_name))
        return Dump.of_found(self.name, path, found, damaged, {"dump": root.parent.name})


def _find_processes(path: Path) -> Processes:
    patterns = ("*_*/", "torch_tensors/*/", "*/torch_tensors/*/")
    found = find_processes(path, patterns, lambda call: _is_module(call.name))
    return [one for one in found if one[1] or (one[0] / _TREE).is_file()]


def _is_module(name: str) -> bool:
    return name == "root" or name.startswith("root.")


def _read_tree(folder: Path) -> dict[str, str]:
    """Return the class of each module, children before parents.

    Siblings are in definition order: the tool's sorting by calls has no effect.
    """
    path = path_inside(folder, _TREE)
    return dict(_walk_tree(read_json_object(path), path)) if path.is_file() else {}


def _walk_tree(node: object, path: Path) -> Iterator[tuple[str, str]]:
    name = node.get("name") if isinstance(node, dict) else None
    if not isinstance(node, dict) or not isinstance(name, str):
        raise UnreadableFileError.of(path, "a module has no name")
    children = node.get("children")
    for child in children if isinstance(children, list) else ():
        yield from _walk_tree(child, path)
    yield name, str(node.get("type", ""))


def _list_calls(token: Path, classes: Mapping[str, str]) -> list[_CallFolder]:
    """Return the call folders of a token in order, functions before the module that calls them."""
    positions = {name: position for position, name in enumerate(classes)}
    found = []
    for folder in token.iterdir():
        if _is_module(folder.name) and folder.is_dir():
            module, api, number = _split_name(folder.name, classes)
            position = positions.get(module, len(positions))
            found.append((position, module, not api, number, api, folder))
    counts: Counter[tuple[str, str]] = Counter()
    calls = []
    for _, module, _, _, api, folder in sorted(found):
        prefix = f"op.{counts[module, api]}.{api}." if api else ""
        counts[module, api] += 1
        calls.append(_CallFolder(folder, int(token.name), module, prefix))
    return calls


def _split_name(name: str, classes: Mapping[str, str]) -> tuple[str, str, int]:
    """Split a folder name into module, function ("" for the module's own call) and number.

    >>> _split_name("root.attn.matmul.1", {"root": "Model", "root.attn": "Attention"})
    ('root.attn', 'matmul', 1)
    """
    numbered = _NUMBERED.fullmatch(name)
    base = numbered[1] if numbered else name
    module, _, api = base.rpartition(".")
    if name in classes or base in classes or module not in classes:
        return name, "", 0
    return module, api, int(numbered[2]) if numbered else 0


def _read_weights(folder: Path, token: int, damaged: DamagedFiles) -> Iterator[DumpedTensor]:
    for file in sorted((folder / "weights").glob("root.*.pth")):
        module, _, name = file.stem.rpartition(".")
        with damaged.skipped():
            yield _describe(folder.parent, file, Site(CallSite(token, module), f"parameter.{name}"))


def _read_call(root: Path, call: _CallFolder, damaged: DamagedFiles) -> Iterator[DumpedTensor]:
    files = sorted(call.folder.glob("*.pth"), key=natural_order)
    table = call.folder / _STATISTICS_FILE
    if not files and table.is_file():
        with damaged.skipped():
            yield from _read_statistics(root, table, call)
    for file in files:
        known = _TENSOR.fullmatch(file.stem)
        port = call.prefix + (known[1] + known[2].replace("_", ".") if known else file.stem)
        with damaged.skipped():
            yield _describe(root, file, Site(CallSite(call.token, call.module), port))


def _describe(root: Path, file: Path, site: Site) -> DumpedTensor:
    key = str(file.relative_to(root))
    values = require_dense(file, _CONTENT, load_objects(path_inside(root, key)))
    return DumpedTensor.of_values(site, key, partial(load_tensor, file, _CONTENT), values)


def _read_statistics(root: Path, file: Path, call: _CallFolder) -> Iterator[DumpedTensor]:
    """Read a table with one row for each tensor.

    An input after an output begins the next call. The tensors of a nested output share an index: all but
    the first get the next free one.
    """
    number, last_kind = 0, ""
    for kind, run in groupby(_read_rows(root, file), key=itemgetter(0)):
        rows = list(run)
        number += kind == "input" and last_kind == "output"
        last_kind, used, next_free = kind, set[int](), 0
        for _, row_index, tensor in rows:
            index = next_free if row_index in used else row_index
            used.add(index)
            next_free = max(next_free, index + 1)
            single = kind == "output" and len(rows) == 1 and index == 0
            port = call.prefix + (kind if single else f"{kind}.{index}")
            yield replace(tensor, site=Site(CallSite(call.token, call.module, number), port))


def _read_rows(root: Path, file: Path) -> Iterator[tuple[str, int, DumpedTensor]]:
    """Yield `input` or `output`, the index, and the statistics of each row."""
    key, line = str(file.relative_to(root)), 1
    try:
        for row in csv.DictReader(read_text(path_inside(root, key)).splitlines()):
            line += 1
            kind = {"Input": "input", "Output": "output"}[row["InputOutput"]]
            tensor = DumpedTensor(
                UNKNOWN_SITE,
                f"{key}, line {line}",
                dtype=row["DataType"].removeprefix("torch."),
                shape=tuple(_parse_dim(dim) for dim in row["Shape"].strip("()").split(",") if dim),
                statistics={name: float(row[column]) for name, column in _COLUMNS.items()},
            )
            yield kind, int(row["Index"]), tensor
    except (KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise UnreadableFileError.of(file, f"not a row of statistics: {error!r}", line) from None


def _parse_dim(text: str) -> int:
    if (dim := int(text)) < 0:
        raise ValueError(f"{dim} is not a dim")
    return dim
