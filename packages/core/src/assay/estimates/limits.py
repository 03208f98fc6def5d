"""The memory and disk that a check may take."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from assay.devices.base import Device
from assay.errors import MachineError
from assay.models.loading.configs import first_line
from assay.progress import format_size
from assay.runs import Progress


def allowed_memory(device: Device, max_memory: int | None = None) -> int:
    """Return the bytes that a model may use on `device`: what is free, or `max_memory` if that is less."""
    free = device.free_memory_bytes() or sys.maxsize  # 0 if unknown
    return free if max_memory is None else min(free, max_memory)


def require_disk(what: str, needed: int, folder: Path, max_disk: int | None, advice: str) -> None:
    """Raise MachineError, with the numbers, if `needed` bytes do not fit on the disk of `folder`.

    what: needs them, for the message. max_disk: the bytes that the user allows; None for the free space.
    advice: options that need less.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    allowed, where = (free, f"{folder} has {format_size(free)} free")
    if max_disk is not None and max_disk < free:
        allowed, where = max_disk, f"--disk allows {format_size(max_disk)}"
    if needed > allowed:
        raise MachineError(
            f"{what} needs about {format_size(needed)} of disk, but {where}. Use {advice}"
        )


def report_unknown(error: Exception, limits: Mapping[str, object], progress: Progress) -> None:
    """Report that `error` prevents an estimate.

    limits: values of the user's limits by option; None if not given.
    Raises: MachineError if a limit was given, because it cannot be checked.
    """
    problem = f"time, memory and disk cannot be estimated for this model: {first_line(error)}"
    for name, limit in limits.items():
        if limit is not None:
            raise MachineError(f"{name}: {problem}") from error
    progress.note(problem)
