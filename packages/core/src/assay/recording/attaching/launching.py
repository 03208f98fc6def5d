"""Running a command whose processes capture their models."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from assay.errors import UsageError
from assay.files import Url, parse_location
from assay.output.streams import print_error
from assay.recording.attaching.watching import CaptureSettings
from assay.recording.capturing.budget import parse_size
from assay.recording.capturing.capture_filter import CaptureFilter
from assay.recording.capturing.control import SIGNAL

_STARTUP = Path(__file__).parent / "startup"


def run_captured(
    command: Sequence[str], output: str, min_parameters: int, options: Mapping[str, Any]
) -> int:
    """Run a command, and write the traces of its models.

    options: keyword arguments of `assay.capture`.
    Returns: its exit code, or 128 plus the number of the signal that ended it.
    Raises: UsageError for an invalid option, a folder that is not empty, or a command that does
        not start.
    """
    location = parse_location(output)
    if _list_files(location):
        raise UsageError(f"{output} is not empty")
    CaptureFilter.parse(
        steps=options.get("steps"), tokens=options.get("tokens"), warmup=options.get("warmup")
    )
    for name in ("max_disk", "max_memory"):
        if text := options.get(name):
            parse_size(text)
    with tempfile.TemporaryDirectory(prefix="assay-capture-") as notes:
        absolute = location if isinstance(location, Url) else location.absolute()
        settings = CaptureSettings(str(absolute), notes, min_parameters, dict(options))
        paths = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = settings.to_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            with subprocess.Popen(command, env=os.environ | environment) as child:
                if options.get("control") == SIGNAL:
                    signal.signal(signal.SIGUSR1, lambda number, _: child.send_signal(number))
                code = child.wait()
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from None
        lines = [
            line
            for note in sorted(Path(notes).iterdir())
            for line in note.read_text(encoding="utf-8").splitlines()
        ]
    for line in lines:
        print_error(f"assay: {line}")
    if found := _describe(location):
        print_error(f"assay: {found}")
    else:
        print_error(
            f"assay: nothing was captured: no module with {min_parameters:,} parameters or more"
            " (--min-parameters) was called in a Python process that reads PYTHONPATH"
        )
    return 128 - code if code < 0 else code


def _list_files(output: Path | Url) -> list[str]:
    if isinstance(output, Path):
        return [str(file.relative_to(output)) for file in output.rglob("*")]
    from assay.trace import list_names  # imports torch

    return list_names(output)


def _describe(output: Path | Url) -> str | None:
    files = map(PurePosixPath, _list_files(output))
    found = sorted(str(file.parent) for file in files if file.name == "manifest.json")
    if not found:
        return None
    return f"captured {output}" + (f": {', '.join(found)}" if found != ["."] else "")
