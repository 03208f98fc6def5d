"""Capturing the models that a process of a captured command calls."""

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from assay.errors import AssayError
from assay.files import Url, parse_location

VARIABLE = "ASSAY_CAPTURE_SETTINGS"


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """The options of a captured command, passed to its processes in an environment variable."""

    output: str
    """Absolute path of the folder of the trace."""
    notes: str
    """Folder for messages of the processes, a file each."""
    min_parameters: int
    """Modules with fewer parameters are not captured."""
    options: dict[str, Any]
    """Keyword arguments of `assay.capture`."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that `of_environment` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> "CaptureSettings":
        """Return the settings of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))


if TYPE_CHECKING:
    from torch import nn

    from assay.recording.capture import Capture

# Defines torch.nn.Module.
_WATCHED = "torch.nn.modules.module"


def attach() -> None:
    """Capture the models of this process, starting when it imports torch."""
    watcher = ModelWatcher(CaptureSettings.of_environment())
    sys.meta_path.insert(0, _ImportWatcher(watcher.install))


class _ImportWatcher(MetaPathFinder):
    """Calls a function with `torch.nn.modules.module` after its import."""

    def __init__(self, act: Callable[[ModuleType], None]) -> None:
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual spec of the watched module, whose loader then calls the function."""
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


class ModelWatcher:
    """Starts a capture of each large module when code outside of modules first calls it."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._depth = threading.local()
        # Weak: a script may create a loss module for every step.
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._num_captured = 0
        self._error: BaseException | None = None
        report = sys.excepthook

        def keep(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._error = error
            report(kind, error, traceback)

        sys.excepthook = keep

    def install(self, module: ModuleType) -> None:
        """Watch all calls of modules. module: `torch.nn.modules.module`."""
        original = module.Module.__call__

        def call(called: "nn.Module", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if getattr(self._depth, "value", 0):
                return original(called, *args, **kwargs)
            self._depth.value = 1
            try:
                self._look_at(called)
                return original(called, *args, **kwargs)
            finally:
                self._depth.value = 0

        module.Module.__call__ = call

    def _look_at(self, called: "nn.Module") -> None:
        if called in self._seen:
            return
        self._seen.add(called)
        num_parameters = sum(one.numel() for one in called.parameters())
        if num_parameters < self._settings.min_parameters:
            return
        # Activation checkpointing and scripts call parts of a captured model.
        self._seen.update(called.modules())
        try:
            capture = self._start(called)
        except AssayError as error:
            self._note(f"{type(called).__name__} was not captured: {error}")
        else:
            _at_exit(capture)(self._finish, capture)

    def _finish(self, capture: "Capture") -> None:
        """End a capture at exit; after an exception its trace stays incomplete."""
        error = self._error
        capture.__exit__(type(error) if error is not None else None, error, None)

    def _note(self, text: str) -> None:
        with (Path(self._settings.notes) / str(os.getpid())).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _start(self, called: "nn.Module") -> "Capture":
        from assay.recording.capture import capture
        from assay.trace import TraceError

        folder = parse_location(self._settings.output)
        self._num_captured += 1
        try:
            return capture(called, folder, **self._settings.options).start()
        except TraceError:  # another model or process uses the folder
            own = folder / f"process-{os.getpid()}-{self._num_captured}"
            return capture(called, own, **self._settings.options).start()


def _at_exit(capture: "Capture") -> Callable[..., object]:
    """Return the function that registers the end of `capture` at exit.

    Clients of remote storage start threads, which Python refuses once `atexit` functions run.
    """
    if not isinstance(capture.plan.folder, Url):
        return atexit.register
    register: Callable[..., object] = threading._register_atexit  # type: ignore[attr-defined]  # noqa: SLF001
    return register
