"""Find what the parameters that a run never reads are for: training, or an argument that the model does not name."""

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from assay.generate.generation_loop import generate
from assay.generate.passes import Side, Work, first_call, watched
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler


def find_other_uses(side: Side, work: Work, unread: Collection[str]) -> dict[str, str]:
    """Map each parameter to its other use, of those that no run of the model read; others are left out.

    A wav2vec2 reads the vector of masked frames in training alone. The embeddings of a DINOv2 read that of masked
    patches if they get an argument that an image classifier does not name.
    """
    model = side.loaded.model
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in unread}
    known = inspect.signature(model.forward).parameters
    uses = {
        name: f"with {argument}"
        for name, owner in owners.items()
        for argument in _arguments_around(owner, name.rpartition(".")[2])
        if argument not in known
    }
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


def _arguments_around(owner: nn.Module, parameter: str) -> Iterator[str]:
    """Yield the optional arguments of `owner` without which its code does not come to `parameter`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(owner).forward)))
    except (OSError, TypeError, SyntaxError):
        return
    arguments = inspect.signature(owner.forward).parameters.values()
    optional = {one.name for one in arguments if one.default is None}
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and any(
            isinstance(node, ast.Attribute) and node.attr == parameter
            for line in branch.body
            for node in ast.walk(line)
        ):
            names = {node.id for node in ast.walk(branch.test) if isinstance(node, ast.Name)}
            yield from sorted(names & optional)
