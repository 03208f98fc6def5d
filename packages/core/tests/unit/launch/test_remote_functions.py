"""Every `RemoteFunction` names a function with the types that it declares."""

import importlib
import inspect
from typing import Any, get_args

import pytest

from assay.launch import RemoteFunction

MODULES = (
    "assay.generate.check",
    "assay.generate.find_operation",
    "assay.generate.float64_rerun",
    "assay.load",
    "assay.training.overfit.check",
    "assay.training.check",
)


def declared() -> dict[str, tuple[RemoteFunction[object, object], object]]:
    """All works of core by name, with their annotations."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name, annotation in module.__annotations__.items():
            if isinstance(work := getattr(module, name), RemoteFunction):
                found[f"{module.__name__}.{name}"] = (work, annotation)
    return found


def name_of(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    name = getattr(annotation, "__name__", str(annotation))
    arguments = ", ".join(map(name_of, get_args(annotation)))
    return f"{name}[{arguments}]" if arguments else name


@pytest.mark.parametrize("name", sorted(declared()))
def test_work_has_the_declared_types(name: str) -> None:
    work, annotation = declared()[name]
    function = inspect.signature(work.load())
    request = next(iter(function.parameters.values())).annotation
    types = request, function.return_annotation
    if isinstance(annotation, str):  # of types that the module imports for type checkers only
        assert annotation == f"RemoteFunction[{', '.join(map(name_of, types))}]"
    else:
        assert get_args(annotation) == types
