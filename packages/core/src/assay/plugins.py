"""User code given as `FILE.py:NAME`, which is imported only in the process that runs it."""

import ast
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from assay.errors import UsageError, raised_in_words, suggest

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def find_plugin_file(reference: str) -> tuple[Path, str]:
    """Return file and name of `FILE.py:NAME`, without importing it.

    Raises: UsageError if it has another form, the file is missing, or the file does not define the name.
    """
    file, separator, name = reference.rpartition(":")
    if not separator or not name or not file.endswith(".py"):
        raise UsageError(f"{reference!r} is not of the form FILE.py:NAME")
    path = Path(os.path.realpath(Path(file).expanduser()))
    if not path.is_file():
        raise UsageError(f"{reference}: there is no file {path}")
    names = list_defined_names(path.read_bytes()) or {name: ast.alias}
    own = sorted(one for one, kind in names.items() if kind is not ast.alias and one[0] != "_")
    if own and name not in names:
        raise UsageError(f"{reference}: {suggest('function', name, own)}")
    return path, name


def list_defined_names(source: str | bytes) -> dict[str, type[ast.AST]] | None:
    """List the names that a Python file defines at its top level, without running it.

    Returns: the kind of node that defines each; None if only running the file shows them: a star import,
        `globals()`, `exec`, `setattr`, `__getattr__`, or a syntax error.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: dict[str, type[ast.AST]] = {}
    for node in _walk_top_level(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = type(node)
            case ast.alias():
                names[node.asname or node.name.partition(".")[0]] = ast.alias
            case ast.Name(ctx=ast.Store()):
                names[node.id] = ast.Name
            case ast.Name(id="globals" | "exec" | "setattr"):
                return None
    return None if names.keys() & {"*", "__getattr__"} else names


def _walk_top_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and their children, without those of functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _walk_top_level(ast.iter_child_nodes(node))


def load_object(reference: str) -> Callable[..., Any]:
    """Import the function or class that `FILE.py:NAME` names.

    The file may import the package that it belongs to, its neighbors, and modules in the working folder.
    Raises: UsageError if the file is missing, raises while it is imported, or lacks the name, or if it imports the
        project of the working folder from another checkout.
    """
    path, name = find_plugin_file(reference)
    spec = importlib.util.spec_from_file_location(f"assay_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{reference}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = sys.modules.keys() - {spec.name}
    # Last, so that no neighbor hides an installed package.
    sys.path += [folder for folder in (str(path.parent), str(Path.cwd())) if folder not in sys.path]
    sys.meta_path[:0] = [one for one in _OwnPackage.around(path) if one not in sys.meta_path]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise UsageError(
            f"{reference}: importing {path} raised {raised_in_words(error)}"
        ) from error
    _refuse_another_checkout(reference, sys.modules.keys() - before)
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{reference}: {name} is not a function or class of {path}")
    return found


@dataclass(frozen=True)
class _OwnPackage(MetaPathFinder):
    """Finds the package around a user's file there, where another checkout of it may be installed."""

    folder: Path

    @classmethod
    def around(cls, path: Path) -> list[Self]:
        """Return the finder of the outermost package that holds a file; none for a file outside of packages."""
        inside = itertools.takewhile(lambda one: (one / "__init__.py").is_file(), path.parents)
        return [cls(folder) for folder in [*inside][-1:]]

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of this package; None for other names."""
        del path
        if fullname != self.folder.name:
            return None
        return PathFinder.find_spec(fullname, [str(self.folder.parent)], target)


def _refuse_another_checkout(reference: str, names: Iterable[str]) -> None:
    """Raise UsageError for a module of another folder that the working folder holds with other content.

    An editable install of one checkout hides the other checkout that a person works in. Installed packages and
    folders on PYTHONPATH are not looked at.
    """
    here = Path(os.path.realpath(Path.cwd()))
    chosen = (one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one)
    apart = [here, *(Path(os.path.realpath(one)) for one in (sys.prefix, sys.base_prefix, *chosen))]
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        path = Path(os.path.realpath(file or here))
        if any(path.is_relative_to(folder) for folder in apart):
            continue
        inside = Path(*name.split("."))
        inside = inside / path.name if path.name == "__init__.py" else inside.with_suffix(".py")
        for own in (here / inside, here / "src" / inside):
            if own.is_file() and own.read_bytes() != path.read_bytes():
                raise UsageError(
                    f"{reference} imports {name} from {path}, and {own} differs from it: install this checkout,"
                    " or put its folder on PYTHONPATH"
                )


def import_torch_alone() -> None:
    """Import torch without the device backends of other packages: reading files needs no device.

    A backend raises on import where its driver is missing.
    Source: https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
    """
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    finally:
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before
