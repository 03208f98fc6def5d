"""Find what the parameters that a run never reads are for: training, an argument that no check gives, or nothing."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from assay.generate.generation_loop import generate
from assay.generate.passes import Side, Work, first_call, watched
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler
from assay.judge.coverage import NO_CODE

_LABELS = "labels"


def find_other_uses(
    side: Side, work: Work, unread: Collection[str], called: Collection[str]
) -> dict[str, str]:
    """Map each parameter to its other use, of those that no run of the model read; others are left out.

    called: modules that ran; what is inside another one may have any use.

    A wav2vec2 reads the vector of masked frames in training alone. The embeddings of a DINOv2 read that of masked
    patches if they get an argument that an image classifier does not name. The head for speakers of a UniSpeech-SAT
    reads the weights of its loss with labels. A wav2vec2-conformer has a convolution that no code calls.
    """
    model = side.loaded.model
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in unread}
    known = inspect.signature(model.forward).parameters
    in_code = _read_in_code(model)
    uses: dict[str, str] = {}
    for name in unread:
        for path, child in _list_readers(model, name):
            if path not in called:
                continue
            owner = model.get_submodule(path)
            arguments = {*_arguments_around(owner, child)}
            if owner is not owners[name]:
                arguments &= {_LABELS}  # code around it may make others
            if needed := sorted(arguments - (known.keys() - {_LABELS})):
                uses[name] = f"with {' and '.join(needed)}"
            elif in_code is not None and not _may_read(child, in_code):
                uses[name] = NO_CODE
    watch = UsageWatch(NullHandler())
    with _training([*owners.values()]), watched(side, watch) as tracer:
        work.begin(tracer)
        with suppress(Exception):  # code of the model
            generate(side.loaded, first_call(work.batch))
    read = watch.read or set()
    return uses | dict.fromkeys(read.intersection(unread), "in training")


@contextmanager
def _training(modules: Collection[nn.Module]) -> Iterator[None]:
    """Put these modules, but not those inside them, into training mode inside the context."""
    with torch.random.fork_rng(devices=[]):
        for module in modules:
            module.training = True
        try:
            yield
        finally:
            for module in modules:
                module.training = False


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _list_readers(model: nn.Module, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each module around a parameter, and the name by which its code may read the next part.

    A container, such as a dictionary of experts, has its parts by keys that no code names.
    """
    parts = name.split(".")
    for depth, child in enumerate(parts):
        path = ".".join(parts[:depth])
        if child.isidentifier() and not isinstance(model.get_submodule(path), _CONTAINERS):
            yield path, child


def _may_read(child: str, names: Collection[str]) -> bool:
    """Return True if code that has these names reads `child`, or may build it, as by f"layer{number}"."""
    return (
        child in names
        or child.rstrip("0123456789") in names
        or any(
            (one.endswith("_") and child.startswith(one))
            or (one.startswith("_") and child.endswith(one))
            for one in names
        )
    )


def _read_in_code(model: nn.Module) -> set[str] | None:
    """Return the names that the files of a model's classes, and of functions these import, read.

    None if the code of one is unknown, or comes with the model: other code may use what it stores, as a value head.
    """
    if type(model).__module__.startswith("transformers_modules."):
        return None
    types = {type(module) for module in model.modules()}
    classes = {base for one in types for base in one.__mro__[:-1]}
    try:
        imported = chain.from_iterable(vars(sys.modules[one.__module__]).values() for one in types)
        functions = {inspect.getfile(one) for one in imported if inspect.isfunction(one)}
        files = functions | {inspect.getfile(one) for one in classes}
        return set().union(*map(_read_names, files))
    except (OSError, TypeError, KeyError, SyntaxError, UnicodeError):
        return None


@cache
def _read_names(file: str) -> frozenset[str]:
    """Return the attributes that a file of Python reads, and words of its strings, outside of functions that initialize."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(Path(file).read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "_init_weights"):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"\w+", node.value))
        pending += ast.iter_child_nodes(node)
    return frozenset(names)


def _arguments_around(owner: nn.Module, parameter: str) -> Iterator[str]:
    """Yield the optional arguments of `owner` without which its code does not come to `parameter`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(owner).forward)))
    except (OSError, TypeError, SyntaxError):
        return
    arguments = inspect.signature(owner.forward).parameters.values()
    optional = {one.name for one in arguments if one.default is None}
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If):
            for lines, is_given in ((branch.body, True), (branch.orelse, False)):
                nodes = (node for line in lines for node in ast.walk(line))
                if any(isinstance(one, ast.Attribute) and one.attr == parameter for one in nodes):
                    yield from optional.intersection(_names_needed(branch.test, is_given))


def _names_needed(test: ast.expr, outcome: bool) -> Iterator[str]:  # noqa: FBT001 - of the test
    """Yield the names that have to hold a value for a condition to have this outcome."""
    match test:
        case ast.Name(id=name) if outcome:
            yield name
        case ast.Compare(
            left=ast.Name(id=name),
            ops=[ast.IsNot() | ast.Is() as how],
            comparators=[ast.Constant(None)],
        ):
            if isinstance(how, ast.IsNot) == outcome:
                yield name
        case ast.BoolOp(op=ast.And() | ast.Or() as how, values=parts):
            if isinstance(how, ast.And) == outcome:
                for part in parts:
                    yield from _names_needed(part, outcome)
