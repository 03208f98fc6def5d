"""Capturing the models that a process of a captured command calls."""

import atexit
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from assay.files import Url, parse_location
from assay.output.streams import print_error

if TYPE_CHECKING:
    from torch import nn

    from assay.recording.capture import Capture

VARIABLE = "ASSAY_CAPTURE_SETTINGS"

# begun, ended: the folder of a trace. problem: a sentence for the user.
NoteKind = Literal["begun", "ended", "problem"]


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """The options of a captured command, passed to its processes in an environment variable."""

    output: str
    """Absolute path of the folder of the trace."""
    notes: str
    """Folder for messages of the processes, a file each."""
    min_parameters: int
    """Modules with fewer parameters are not captured."""
    model_name: str | None
    """The only model to capture: its class, after its number as in `2-Llama` if several have it."""
    options: dict[str, Any]
    """Keyword arguments of `assay.capture`."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that `of_environment` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> "CaptureSettings":
        """Return the settings of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))


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
        # Calls in other threads wait until the capture of their model has started.
        self._lock = threading.RLock()
        # Weak: a script may create a loss module for every step.
        self._captured: WeakSet[nn.Module] = WeakSet()
        self._small: WeakSet[nn.Module] = WeakSet()
        self._num_models = 0
        self._has_captured = False
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
        import torch

        original = module.Module.__call__

        def call(called: "nn.Module", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            # A capture cannot start inside of a graph, and within a model only the model is captured.
            if torch.compiler.is_compiling() or self._depth.__dict__.get("value"):
                return original(called, *args, **kwargs)
            if not self._is_captured(called):
                return original(called, *args, **kwargs)
            self._depth.value = 1
            try:
                return original(called, *args, **kwargs)
            finally:
                self._depth.value = 0

        self._call = call
        module.Module.__call__ = call

    def _is_captured(self, called: "nn.Module") -> bool:
        """Return True if a capture has the module. Starts one for a large module."""
        if called in self._captured or called in self._small:
            return called in self._captured
        with self._lock:
            if called in self._captured:
                return True
            if sum(map(_count_elements, called.parameters())) < self._settings.min_parameters:
                self._small.add(called)
                return False
            try:
                self._start(called)
            except Exception as error:  # noqa: BLE001 - the script must go on
                self._note("problem", f"{type(called).__name__} was not captured: {error}")
            # Activation checkpointing and scripts call parts of a captured model.
            self._captured.update(called.modules())
            return True

    def _start(self, called: "nn.Module") -> None:
        from torch._dynamo.eval_frame import skip_code

        from assay.recording.capture import capture
        from assay.trace import TraceError

        # Otherwise torch.compile compiles a frame of this function for each class of modules.
        skip_code(self._call.__code__)
        self._num_models += 1
        kind, chosen = type(called).__name__, self._settings.model_name
        if chosen not in (None, kind, f"{self._num_models}-{kind}"):
            return
        root = parse_location(self._settings.output)
        number, running = self._num_models if self._has_captured else 1, None
        while running is None:
            folder = root if number == 1 else root / f"{number}-{kind}"
            with suppress(TraceError):  # another model or process uses the folder
                running = capture(called, folder, **self._settings.options).start()
            number += 1
        self._has_captured = True
        self._note("begun", str(running.folder))
        _at_exit(running)(self._finish, running)

    def _finish(self, capture: "Capture") -> None:
        """End a capture at exit; after an exception its trace stays incomplete."""
        error = self._error
        capture.__exit__(type(error) if error is not None else None, error, None)
        if capture.is_complete:
            self._note("ended", str(capture.folder))

    def _note(self, kind: NoteKind, text: str) -> None:
        """Write a note for the command, or print a problem if the disk is full."""
        file = Path(self._settings.notes, str(os.getpid()))
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([kind, text]) + "\n")
        except OSError:
            if kind == "problem":
                print_error(f"assay: {text}")


def _at_exit(capture: "Capture") -> Callable[..., object]:
    """Return the function that registers the end of `capture` at exit.

    Clients of remote storage start threads, which Python refuses once `atexit` functions run.
    """
    if not isinstance(capture.plan.folder, Url):
        return atexit.register
    register: Callable[..., object] = threading._register_atexit  # type: ignore[attr-defined]  # noqa: SLF001
    return register


def _count_elements(parameter: "nn.Parameter") -> float:
    """Return the number of elements; infinity before a lazy module's first call, which sets it."""
    from torch.nn.parameter import is_lazy

    is_unset: bool = is_lazy(parameter)
    return math.inf if is_unset else parameter.numel()
