"""Running a command whose processes capture their models."""

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self, get_args

from assay.errors import MachineError, UsageError
from assay.files import Url, parse_location
from assay.output.streams import print_error
from assay.recording.attached_process import CaptureSettings, NoteKind
from assay.recording.limits import CaptureFilter, parse_size
from assay.watchdog import WATCHDOG, Kind, signal_group, temporary_folder

_STARTUP = Path(__file__).parent / "startup"


def run_captured(
    command: Sequence[str],
    output: str,
    min_parameters: int,
    model_name: str | None,
    options: Mapping[str, Any],
) -> int:
    """Run a command, and write the traces of its models.

    options: keyword arguments of `assay.capture`. The others are those of `CaptureSettings`.
    Returns: its exit code, or 128 plus the number of the signal that ended it; 2 after a success
        without a complete trace.
    Raises: UsageError for an invalid option, a folder that is not empty, or a command that does
        not start.
    """
    location = parse_location(output)
    CaptureFilter.parse(
        steps=options.get("steps"), tokens=options.get("tokens"), warmup=options.get("warmup")
    )
    for name in ("max_disk", "max_memory"):
        if text := options.get(name):
            parse_size(text)
    forwarding = _SignalForwarding()
    with _claimed(location) as absolute, temporary_folder("assay-capture-") as notes, forwarding:
        settings = CaptureSettings(absolute, str(notes), min_parameters, model_name, dict(options))
        paths = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = settings.to_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            code = forwarding.run(command, os.environ | environment)
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from None
        found = _read_notes(notes)
    for problem in found["problem"]:
        print_error(f"assay: {problem}")
    begun, ended = (
        sorted(folder.removeprefix(absolute).strip("/") or "." for folder in found[kind])
        for kind in ("begun", "ended")
    )
    cut_off = [name for name in begun if name not in ended]
    if ended:
        which = f": {', '.join(ended)}" if ended != ["."] else ""
        print_error(f"assay: captured {output}{which}")
    if cut_off:
        print_error(f"assay: without calls, or cut off, in {output}: {', '.join(cut_off)}")
    if not begun:
        print_error(
            f"assay: nothing was captured: no module with {min_parameters:,} parameters or more"
            " (--min-parameters) was called, except inside of compiled functions, in a Python process"
            " that reads PYTHONPATH"
        )
    if code == 0 and (cut_off or not ended):
        return MachineError.exit_code
    return 128 - code if code < 0 else code


def _read_notes(folder: Path) -> dict[NoteKind, set[str]]:
    """Return the texts that the processes of the command have noted."""
    found: dict[NoteKind, set[str]] = {kind: set() for kind in get_args(NoteKind)}
    for file in folder.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            kind, text = json.loads(line)
            found[kind].add(text)
    return found


@contextmanager
def _claimed(output: Path | Url) -> Iterator[str]:
    """Lock an empty folder for this command. A new folder that stays empty is removed.

    Yields: its absolute path, or the URL.
    Raises: UsageError if it is not empty or another command holds it.
    """
    if isinstance(output, Url):
        from assay.trace import list_names  # imports torch

        _require_empty(output, list_names(output))
        yield str(output)
        return
    output = output.absolute()
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another capture writes to {output}: name a new folder, or put `assay capture` before"
                " the launcher of the ranks (srun, torchrun), not behind it"
            ) from None
        except OSError:  # a file system without locks
            pass
        _require_empty(output, os.listdir(output))  # noqa: PTH208 - names only
        if not os.access(output, os.W_OK):
            raise UsageError(f"{output} cannot be written")
        yield str(output)
    finally:
        for folder in created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(lock)


def _require_empty(output: Path | Url, names: Sequence[str]) -> None:
    if names:
        raise UsageError(f"{output} is not empty")


class _SignalForwarding:
    """Runs a command that gets the signals which end this process, and ends with it.

    The command leads a process group of its own, except on a terminal: there, its group would not get
    the input, and the terminal sends Ctrl-C to both.
    """

    def __init__(self) -> None:
        self._is_grouped = not (os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp())
        self._child: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # else it is ignored, as by nohup
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command. Returns: its exit code, as `subprocess` has it. Raises: OSError."""
        group = 0 if self._is_grouped else None
        with subprocess.Popen(command, env=environment, process_group=group) as self._child:
            kind: Kind = "group" if self._is_grouped else "process"
            WATCHDOG.watch(kind, self._child.pid)
            for number in self._received:
                self._forward(self._child, number)
            code = self._child.wait()
        # After a signal, the watchdog ends what is left of the group.
        if not (self._is_grouped and self._received):
            WATCHDOG.forget(kind, self._child.pid)
        return code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received.append(number)
        if self._child is not None:
            self._forward(self._child, number)

    def _forward(self, child: "subprocess.Popen[bytes]", number: int) -> None:
        """Send a signal to the command; SIGINT to its whole group, as a terminal does."""
        if number != signal.SIGINT:
            child.send_signal(number)
        elif self._is_grouped:
            signal_group(child.pid, signal.SIGINT)
