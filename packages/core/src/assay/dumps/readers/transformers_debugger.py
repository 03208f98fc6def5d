"""Dumps of Transformers' model debugger (`model_addition_debugger_context`).

`{Class}_debug_tree_FULL_TENSORS.json` is the tree of module calls in one forward pass. Each tensor has
statistics, printed to 5 digits, and values: the name of a safetensors file, or printed text, which torch
shortens. `{Class}_debug_tree_SUMMARY.json` is the same tree without values. Modules with children have no
outputs, except the model itself.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError, Statistic
from assay.dumps.reading import path_inside, walk_values
from assay.files import UnreadableFileError, parse_json, read_text
from assay.files.safetensors import read_header
from assay.models.stored_tensors import map_tensor
from assay.sites import CallSite, Site, unwrapped_path

# FULL_TENSORS is preferred: it sorts before SUMMARY.
_TREE = re.compile(r"(.+)_debug_tree_(FULL_TENSORS|SUMMARY)\.json")
# torch prints at most 1,000 elements of a tensor, 12 kB.
_MAX_TREE_BYTES = 1 << 29
_SHAPE = re.compile(r"torch\.Size\(\[((?:\d{1,18}(?:, |(?=\])))*)\]\)")
# As in "tensor(-4.3815e-04, dtype=torch.bfloat16)".
_PRINTED = re.compile(r"tensor\(\s*([-+.\w]+)")
_STATISTICS: tuple[Statistic, ...] = ("mean", "std", "min", "max")
_TENSOR_NAME = "data"


class TransformersDebuggerReader:
    """Reader of the debugger's trees, with safetensors files, printed values, or statistics only."""

    name = "transformers-debugger"

    def recognize(self, path: Path) -> bool:
        """Return True for a dump folder, or a tree file."""
        return bool(_find_trees(path))

    def open(self, path: Path) -> Dump:
        """Read the tree of the model's calls."""
        trees = _find_trees(path)
        if len(trees) > 1:
            names = ", ".join(tree.name for tree in trees)
            raise DumpError(f"{path} holds the dumps of {len(trees)} models: name one of {names}")
        tree, root = trees[0], _read_tree(trees[0])
        found = list(_walk_calls(root, root["module_path"], Counter(), tree))
        num_tensors = Counter(file for _, file in found if file)
        damaged = DamagedFiles()
        damaged.problems += [
            f"{file} holds only the last of {number} calls of its module"
            for file, number in num_tensors.items()
            if number > 1
        ]
        readable: list[DumpedTensor] = []
        for tensor, name in found:
            num_tensors[name] -= 1
            file = path_inside(tree.parent, name) if name else None
            if file is not None and not file.is_file():
                damaged.problems.append(f"{file.name} is missing")
                continue
            is_last = not num_tensors[name]
            load = partial(_read_file, file) if file and is_last else None
            readable.append(replace(tensor, load=load))
        provenance = {"model": root["module_path"], "tree": tree.name, "pass": "the last forward"}
        return Dump.of_found(self.name, path, readable, damaged, provenance)


def _read_file(file: Path) -> Tensor:
    for stored in read_header(file):
        if stored.name == _TENSOR_NAME:
            return map_tensor(stored)
    raise UnreadableFileError.of(file, f"it holds no tensor `{_TENSOR_NAME}`")


def _find_trees(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _TREE.fullmatch(path.name) else []
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*_debug_tree_*.json")):
        if match := _TREE.fullmatch(file.name):
            found.setdefault(match[1], file)
    return list(found.values())


def _read_tree(tree: Path) -> dict[str, Any]:
    path_inside(tree.parent, tree.name)
    root = parse_json(read_text(tree, _MAX_TREE_BYTES), tree)
    if not isinstance(root, dict) or not isinstance(root.get("module_path"), str):
        raise UnreadableFileError.of(tree, "it is not a tree of calls")
    return root


def _walk_calls(
    node: Mapping[str, Any], model: str, num_calls: Counter[str], tree: Path
) -> Iterator[tuple[DumpedTensor, str]]:
    """Yield every tensor of a call and of its child calls, with its file name or ""."""
    path = node["module_path"]
    children = node.get("children") or []
    for child in children if isinstance(children, list) else [None]:
        if not isinstance(child, dict) or not isinstance(child.get("module_path"), str):
            raise UnreadableFileError.of(tree, f"a child of {path} is not a call")
        yield from _walk_calls(child, model, num_calls, tree)
    module = unwrapped_path("" if path == model else path.removeprefix(f"{model}."))
    at = CallSite(0, module, num_calls[module])
    num_calls[module] += 1
    key = f"{path}, call {at.call}" if at.call else path
    inputs = node.get("inputs")
    inputs = inputs if isinstance(inputs, dict) else {}
    for port, value in (
        ("input", inputs.get("args")),
        ("input", inputs.get("kwargs")),
        ("output", node.get("outputs")),
    ):
        for name, entry in walk_values(port, value, _is_tensor):
            stored = entry.get("value")
            tensor = replace(
                _parse_tensor(Site(at, name), entry, tree),
                key=f"{key}: {name}",
                class_name=model if path == model else "",
            )
            yield tensor, stored if isinstance(stored, str) else ""


def _is_tensor(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("shape"), str) and "dtype" in value


def _parse_tensor(site: Site, entry: Mapping[str, Any], tree: Path) -> DumpedTensor:
    shape = _SHAPE.fullmatch(entry["shape"])
    if shape is None:
        raise UnreadableFileError.of(tree, f"{site}: {entry['shape']!r} is not a shape")
    statistics = {name: _parse_printed(entry.get(name)) for name in _STATISTICS}
    return DumpedTensor(
        site,
        str(site),
        dtype=str(entry["dtype"]).removeprefix("torch."),
        shape=tuple(int(dim) for dim in shape[1].split(", ") if dim),
        statistics={name: value for name, value in statistics.items() if value is not None},
    )


def _parse_printed(text: object) -> float | None:
    found = _PRINTED.match(text) if isinstance(text, str) else None
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
