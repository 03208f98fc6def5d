"""Send a test and its fixtures to every rank of a world.

Imports neither torch nor pytest. `assay.testing.rank_body` runs in the ranks.
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
from typing import TYPE_CHECKING, NoReturn

from assay.errors import UsageError
from assay.launch import Rank, UnsendableError, World, call, outer_world_size
from assay.progress import Progress
from assay.watchdog import temporary_folder

if TYPE_CHECKING:
    from types import ModuleType

    import pytest

# Fixtures that every rank makes itself.
RANK_FIXTURES = frozenset({"mesh", "device"})

# Show only the end of a rank's output, to keep test reports readable.
_SHOWN_BYTES = 1 << 16


_preloaded: list[str] = []


def preload_for_ranks(*modules: str) -> None:
    """Import `modules` once for all ranks instead of in each rank; call this in a conftest.

    Importing them must start no thread and open no device, as with transformers' models. An import of
    2 s takes a minute on 32 ranks.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


class MeshOfRanks:
    """The value of the fixture `mesh` outside the ranks; any use of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # read by pytest, pickle and the like
            raise AttributeError(name)
        raise UsageError(
            f"mesh.{name}: the mesh is made in the ranks, after all fixtures; use it in the test's body"
        )


def run_test_in_world(item: "pytest.Function", world: World) -> None:
    """Run the body of `item` on every rank of `world`, and print the ranks' output.

    Raises: as `call`; UnsendableError for a fixture that cannot be pickled.
    """
    __tracebackhide__ = True
    parameters = inspect.signature(item.obj).parameters
    fixtures = {name: item.funcargs[name] for name in parameters if name in item.funcargs}
    if outer_world_size(os.environ) is None:
        _run_in_new_ranks(item, fixtures, world)
    else:
        call(_run_as_this_rank, (item.obj, fixtures), world=world)


def _run_as_this_rank(
    request: tuple[Callable[..., object], dict[str, object]], _: Progress, rank: Rank
) -> None:
    __tracebackhide__ = True
    from assay.testing.rank_body import call_test, fixtures_of

    function, fixtures = request
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
    body = BodyCall(
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
    with temporary_folder("assay-logs-") as folder:
        if item.config.getoption("usepdb", default=False):
            body = replace(body, stops_in=str(folder))
        preload = (*world.preload, "pytest", "assay.testing.rank_body", *_preloaded)
        try:
            call(run_body, body, world=replace(world, preload=preload), folder=folder)
        finally:
            for rank in range(world.size):
                _show_log(rank, folder / f"rank{rank}.log")


def pack_fixtures(fixtures: Mapping[str, object]) -> bytes:
    """Pickle all values into one stream, so that objects shared by fixtures stay shared.

    Raises: UnsendableError with the name of the fixture that cannot be pickled.
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
    """Return the files of all modules with assertions that pytest rewrote, by module name."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    specs = {name: getattr(module, "__spec__", None) for name, module in [*sys.modules.items()]}
    return {
        name: str(spec.origin)
        for name, spec in specs.items()
        if spec is not None and isinstance(spec.loader, AssertionRewritingHook)
    }


@lru_cache(maxsize=64)
def _rewritten_code(file: str, _changed: int) -> bytes:
    """Compile `file` with rewritten assertions once for all ranks.

    _changed: modification time, so that a changed file is compiled again.
    """
    from assay.testing.rank_body import rewrite

    return marshal.dumps(rewrite(Path(file)))


def _show_log(rank: int, log: Path) -> None:
    size = log.stat().st_size if log.exists() else 0
    if not size:
        return
    with log.open("rb") as file:
        file.seek(max(0, size - _SHOWN_BYTES))
        text = file.read().decode(errors="replace")
    cut = f" (the last {_SHOWN_BYTES} of {size} bytes)" if size > _SHOWN_BYTES else ""
    sys.stdout.write(f"--- rank {rank}{cut} ---\n{text}")
