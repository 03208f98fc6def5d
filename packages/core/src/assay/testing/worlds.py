"""Tests on every rank of a world: what is sent to the ranks, and what comes back.

Imports neither torch nor pytest; the ranks' half is `assay.testing.rank_body`.
"""

import inspect
import io
import marshal
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from assay.errors import UsageError
from assay.launch import Rank, UnsendableError, World, launch_world, outer_world_size

if TYPE_CHECKING:
    from types import ModuleType

    import pytest

# Made anew in every rank.
RANK_FIXTURES = frozenset({"mesh", "device"})

# Of what a rank printed, this much is shown; the report of a test must stay readable.
_SHOWN_BYTES = 1 << 16


_preloaded: list[str] = []


def preload_for_ranks(*modules: str) -> None:
    """Import `modules` once for all ranks, not in each: for a conftest whose tests need them.

    They must start no thread and touch no device when they are imported; transformers' models
    are such. An import that takes 2 s takes a minute on 32 ranks.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


class MeshFixtureError(UsageError):
    """The fixture mesh, where there is no mesh."""

    @classmethod
    def unmarked(cls) -> "MeshFixtureError":
        """The test runs on no world."""
        return cls("the fixture mesh needs a world of ranks; mark the test world(dp=2)")

    @classmethod
    def in_fixture(cls, name: str) -> "MeshFixtureError":
        """A fixture uses it."""
        return cls(
            f"mesh.{name}: the mesh is made in the ranks, after all fixtures; use it in the test's "
            "body"
        )


class MeshOfRanks:
    """What the fixture mesh is outside of the ranks: a promise."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by pytest, pickle and the like
            raise AttributeError(name)
        raise MeshFixtureError.in_fixture(name)


def run_test_in_world(item: "pytest.Function", world: World) -> None:
    """Run the body of `item` on every rank of `world`; what ranks print goes to standard output.

    Raises: as `launch_world`; UnsendableError for a fixture that cannot travel.
    """
    __tracebackhide__ = True
    parameters = inspect.signature(item.obj).parameters
    fixtures = {name: item.funcargs[name] for name in parameters if name in item.funcargs}
    if outer_world_size(os.environ) is None:
        _run_in_new_ranks(item, fixtures, world)
    else:
        launch_world(_run_as_this_rank, world, item.obj, fixtures)


def _run_as_this_rank(
    rank: Rank, function: Callable[..., object], fixtures: dict[str, object]
) -> None:
    __tracebackhide__ = True
    from assay.testing.rank_body import call_test, fixtures_of

    call_test(function, fixtures | fixtures_of(rank, fixtures))


def _run_in_new_ranks(
    item: "pytest.Function", fixtures: Mapping[str, object], world: World
) -> None:
    __tracebackhide__ = True
    from assay.testing.rank_body import BodyCall, run_body

    module: ModuleType = item.module
    sent = {name: value for name, value in fixtures.items() if name not in RANK_FIXTURES}
    file = str(module.__file__)
    files = _rewritten_files()
    call = BodyCall(
        module=module.__name__,
        file=file,
        test=f"{item.cls.__qualname__}.{item.originalname}" if item.cls else item.originalname,
        fixtures=pack_fixtures(sent),
        of_rank=tuple(fixtures.keys() & RANK_FIXTURES),
        files=files,
        code=_rewritten_code(file, Path(file).stat().st_mtime_ns)
        if module.__name__ in files
        else b"",
        filters=list(warnings.filters),
    )
    with TemporaryDirectory(prefix="assay-logs-") as folder:
        if item.config.getoption("usepdb", default=False):
            call = replace(call, stops_in=folder)
        preload = (*world.preload, "pytest", "assay.testing.rank_body", *_preloaded)
        try:
            launch_world(run_body, replace(world, preload=preload, log_folder=Path(folder)), call)
        finally:
            for rank in range(world.size):
                _show_log(rank, Path(folder) / f"rank{rank}.log")


def pack_fixtures(fixtures: Mapping[str, object]) -> bytes:
    """All values in one stream, so that what they share stays shared.

    Raises: UnsendableError that names the fixture.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dump(len(fixtures))
    for name, value in fixtures.items():
        pickler.dump(name)
        try:
            pickler.dump(value)
        except Exception as error:  # noqa: BLE001 - pickle raises what the value's class does
            raise UnsendableError.of(f"fixture {name!r}", value, error) from None
    return stream.getvalue()


def _rewritten_files() -> dict[str, str]:
    """The files of all modules in which pytest has rewritten assertions, by name."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    specs = {name: getattr(module, "__spec__", None) for name, module in [*sys.modules.items()]}
    return {
        name: str(spec.origin)
        for name, spec in specs.items()
        if spec is not None and isinstance(spec.loader, AssertionRewritingHook)
    }


@lru_cache(maxsize=64)
def _rewritten_code(file: str, _changed: int) -> bytes:
    """Rewritten here once, not in every rank."""
    from assay.testing.rank_body import rewrite

    return marshal.dumps(rewrite(Path(file)))


def _show_log(rank: int, log: Path) -> None:
    """Print it here: pytest shows it with what the test's own process printed."""
    size = log.stat().st_size if log.exists() else 0
    if not size:
        return
    with log.open("rb") as file:
        file.seek(max(0, size - _SHOWN_BYTES))
        text = file.read().decode(errors="replace")
    cut = f" (the last {_SHOWN_BYTES} of {size} bytes)" if size > _SHOWN_BYTES else ""
    sys.stdout.write(f"--- rank {rank}{cut} ---\n{text}")
