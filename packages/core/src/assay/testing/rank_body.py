"""The body of a test on one rank: its module is imported as pytest does, its fixtures unpacked.

Imports pytest, but runs none of it: a session of pytest in every rank would cost 0.2 s each.
"""

import ast
import importlib.util
import inspect
import io
import marshal
import pickle
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from assay.errors import UsageError
from assay.launch import Rank, RankSkipped
from assay.testing.debugging import stop_at


@dataclass(frozen=True, slots=True)
class BodyCall:
    """What a rank is sent instead of a test.

    test: the function's qualified name in its module.
    fixtures: as `assay.testing.worlds.pack_fixtures` wrote them.
    of_rank: names of fixtures that the rank makes itself.
    files: of modules in which assertions are rewritten, by name.
    code: of the test's own module, marshalled and with rewritten assertions; b"" if it has none.
    filters: of warnings, as `warnings.filters` holds them.
    stops_in: a folder of all ranks, where a failure is to be debugged; "" where it is not.
    """

    module: str
    file: str
    test: str
    fixtures: bytes
    of_rank: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    code: bytes = b""
    filters: Sequence[Any] = ()
    stops_in: str = ""


class FixtureLostError(UsageError):
    """A fixture that was packed, but cannot be unpacked in a rank."""

    @classmethod
    def of(cls, name: str, error: BaseException) -> "FixtureLostError":
        """`error`: what unpickling said."""
        return cls(
            f"fixture {name!r} cannot be made again in a rank: {type(error).__name__}: {error}"
        )


def run_body(rank: Rank, call: BodyCall) -> None:
    """Run the test of `call` as `rank`. Raises: what the test raises; RankSkipped."""
    __tracebackhide__ = True
    sys.meta_path.insert(0, RewritingFinder(call.files))
    module = _import_test_module(call)
    function = _find_test(module, call.test)
    arguments = _unpack_fixtures(call.fixtures)
    arguments |= fixtures_of(rank, call.of_rank)
    with warnings.catch_warnings():
        warnings.filters[:] = call.filters  # type: ignore[index] # a list, typed as a sequence
        try:
            call_test(function, arguments)
        except RankSkipped:
            raise
        except Exception as error:
            if call.stops_in:
                stop_at(error, rank.number, Path(call.stops_in))
            raise


def fixtures_of(rank: Rank, names: Iterable[str]) -> dict[str, object]:
    """Those fixtures of `names` that every rank has of its own."""
    made = {"mesh": rank.mesh, "device": rank.device}
    return {name: made[name] for name in names if name in made}


def call_test(function: Any, arguments: Mapping[str, object]) -> None:  # noqa: ANN401 - any test
    """Call a test. Raises: RankSkipped if it skips."""
    __tracebackhide__ = True
    try:
        function(**arguments)
    except pytest.skip.Exception as skipped:
        raise RankSkipped(str(skipped)) from None


def rewrite(file: Path) -> CodeType:
    """The code of `file` with assertions that say the values they compared."""
    source = file.read_bytes()
    tree = ast.parse(source, str(file))
    rewrite_asserts(tree, source, str(file))
    return compile(tree, str(file), "exec", dont_inherit=True)


class RewritingFinder(MetaPathFinder, Loader):
    """Finds those modules in which pytest rewrote assertions, and rewrites them here as well."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, None for modules that pytest left as they are."""
        del path, target
        file = self._files.get(fullname)
        if file is None:
            return None
        locations = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=locations
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the rewritten code."""
        exec(rewrite(Path(self._files[module.__name__])), module.__dict__)  # noqa: S102 - a loader


def _import_test_module(call: BodyCall) -> ModuleType:
    """Under the name that it has in pytest's process, which need not be importable."""
    spec = importlib.util.spec_from_file_location(call.module, call.file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{call.file} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[call.module] = module
    if call.code:
        exec(marshal.loads(call.code), module.__dict__)  # noqa: S102, S302 - as an import does
    else:
        spec.loader.exec_module(module)
    return module


def _find_test(module: ModuleType, name: str) -> Any:  # noqa: ANN401 - any test
    """The function called `name`; a method is bound to a new instance of its class."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
        if inspect.isclass(found):
            found = found()
    return found


def _unpack_fixtures(packed: bytes) -> dict[str, object]:
    unpickler = pickle.Unpickler(io.BytesIO(packed))  # noqa: S301 - written by pytest's process
    values: dict[str, object] = {}
    for _ in range(unpickler.load()):
        name = unpickler.load()
        try:
            values[name] = unpickler.load()
        except Exception as error:
            raise FixtureLostError.of(name, error) from error
    return values
