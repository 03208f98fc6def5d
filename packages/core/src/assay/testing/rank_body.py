"""Run the body of a test on one rank: import its module, unpickle its fixtures, call it.

Ranks run no pytest session, which would take 0.2 s on each. Under `--pdb`, rank 0 takes the terminal and
stops at the failure.
"""

import ast
import bdb
import importlib.util
import inspect
import io
import marshal
import os
import pdb  # noqa: T100 - needed for --pdb
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, cast

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from assay.errors import UsageError
from assay.launch import Rank, RankSkipped, TimeLimits
from assay.progress import Progress

DEBUGGED_RANK = 0
# Time limits must not end the ranks during debugging.
DEBUGGING_LIMITS = TimeLimits(
    start_seconds=600.0, collective_seconds=86_400.0, body_seconds=90_000.0
)

_TERMINAL = Path("/dev/tty")
_FLAG = "stopped"
# If all ranks fail, the others wait this long for rank 0 to signal that it has stopped.
_NOTICE_SECONDS = 2.0
_POLL_SECONDS = 0.05


class StoppedInRank(bdb.BdbQuit):
    """A failure that was debugged on rank 0; pytest does not open a debugger for it."""


def stop_at(error: BaseException, rank: int, folder: Path) -> None:
    """Open the debugger where `error` was raised on rank 0; on other ranks wait until it closes.

    Without a terminal, does nothing. folder: shared by all ranks of this test.
    """
    flag = folder / _FLAG
    if rank == DEBUGGED_RANK:
        flag.touch()
        try:
            _open_debugger(error)
        finally:
            flag.unlink()
        return
    # Returning would end all ranks, and the debugger with them.
    deadline = time.monotonic() + _NOTICE_SECONDS
    while flag.exists() or time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _open_debugger(error: BaseException) -> None:
    try:
        source, sink = _TERMINAL.open(), _TERMINAL.open("w")
    except OSError:
        return
    with source, sink, _in_foreground(source):
        sink.write(f"\n\nrank {DEBUGGED_RANK}: {type(error).__name__}: {error}\n")
        debugger = pdb.Pdb(stdin=source, stdout=sink, nosigint=True)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


@contextmanager
def _in_foreground(terminal: IO[str]) -> Iterator[None]:
    """Make this process group the terminal's foreground group, so that it may read."""
    before = os.tcgetpgrp(terminal.fileno())
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal.fileno(), os.getpgrp())
        yield
    finally:
        os.tcsetpgrp(terminal.fileno(), before)
        signal.signal(signal.SIGTTOU, handler)


@dataclass(frozen=True, slots=True)
class BodyCall:
    """A test as it is sent to the ranks."""

    module: str
    file: str
    test: str
    """Qualified name of the function in its module."""
    fixtures: bytes
    """Result of `assay.testing.worlds.pack_fixtures`."""
    of_rank: tuple[str, ...]
    """Names of fixtures that the rank makes itself."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of modules with rewritten assertions, by module name."""
    code: bytes = b""
    """Marshalled code of the test's module with rewritten assertions, if there are any."""
    filters: Sequence[Any] = ()
    """Entries of `warnings.filters`."""
    stops_in: str = ""
    """Under `--pdb`, a folder that all ranks share."""


def run_body(call: BodyCall, _: Progress, rank: Rank) -> None:
    """Run the test of `call` on `rank`. Raises: the test's exception; RankSkipped if it skips."""
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
    """Return the named fixtures that every rank makes itself."""
    made = {"mesh": rank.mesh, "device": rank.device}
    return {name: made[name] for name in names if name in made}


def call_test(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Call a test. Raises: its exception; RankSkipped if it skips."""
    __tracebackhide__ = True
    try:
        function(**arguments)
    except pytest.skip.Exception as skipped:
        raise RankSkipped(str(skipped)) from None


def rewrite(file: Path) -> CodeType:
    """Compile `file` with assertions that report the compared values."""
    source = file.read_bytes()
    tree = ast.parse(source, str(file))
    rewrite_asserts(tree, source, str(file))
    return compile(tree, str(file), "exec", dont_inherit=True)


class RewritingFinder(MetaPathFinder, Loader):
    """Import hook that rewrites assertions in the modules in which pytest has rewritten them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `files`; None for others."""
        del path, target
        file = self._files.get(fullname)
        if file is None:
            return None
        locations = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=locations
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the rewritten code of `module` in its namespace."""
        exec(rewrite(Path(self._files[module.__name__])), module.__dict__)  # noqa: S102 - a loader


def _import_test_module(call: BodyCall) -> ModuleType:
    """Import the module from its file under its name in pytest, which may not be importable."""
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


def _find_test(module: ModuleType, name: str) -> Callable[..., object]:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
        if inspect.isclass(found):
            found = found()
    return cast("Callable[..., object]", found)


def _unpack_fixtures(packed: bytes) -> dict[str, object]:
    unpickler = pickle.Unpickler(io.BytesIO(packed))  # noqa: S301 - written by pytest's process
    values: dict[str, object] = {}
    for _ in range(unpickler.load()):
        name = unpickler.load()
        try:
            values[name] = unpickler.load()
        except Exception as error:
            raise UsageError(
                f"fixture {name!r} cannot be made again in a rank: {type(error).__name__}: {error}"
            ) from error
    return values
