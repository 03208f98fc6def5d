"""Measures the peak memory of a run, and what it does not release."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import psutil

from assay_smoke.machine.process_tree import ProcessTree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assay.devices.base import Device

_SAMPLE_SECONDS = 0.25

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use before a run, at its peak, and after its teardown."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int

    def is_back(self, slack_bytes: int) -> bool:
        """Return whether all but `slack_bytes` was released."""
        return self.end_bytes <= self.start_bytes + slack_bytes

    def __str__(self) -> str:
        left = self.end_bytes - self.start_bytes
        kept = f", {format_size(left)} not released" if left > 0 else ""
        return f"peak {format_size(self.peak_bytes - self.start_bytes)}{kept}"


def format_size(size_bytes: int) -> str:
    """Format a size in the largest unit that gives at least one."""
    size, unit = float(size_bytes), 0
    while abs(size) >= _STEP and unit + 1 < len(_UNITS):
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size == int(size) else f"{size:.1f} {_UNITS[unit]}"


def resident_bytes(processes: "Iterable[psutil.Process]") -> int:
    """Return the resident memory of all processes. Shared pages count once if the kernel tells."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            try:
                full = process.memory_full_info()
                total += int(getattr(full, "pss", 0) or full.rss)
            except psutil.AccessDenied:
                total += int(process.memory_info().rss)
    return total


class MemoryWatch:
    """Samples the memory of a process tree and of a device during the block.

    Drivers report only the free memory of the whole device, so other processes count too.

    device: after the block; None for the host and for drivers that do not report free memory.
    """

    host: MemoryUse
    device: MemoryUse | None = None

    def __init__(self, tree: ProcessTree, device: "Device | None" = None) -> None:
        self._tree = tree
        is_measured = (
            device is not None and device.torch_device != "cpu" and device.free_memory_bytes() > 0
        )
        self._device = device if is_measured else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> Self:
        self._free_at_start = self._free()
        self._start = self._peak = resident_bytes(self._tree.living())
        self._device_peak = 0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        end, device_end = self._sample()
        self.host = MemoryUse(self._start, self._peak, end)
        if self._device is not None:
            self.device = MemoryUse(0, self._device_peak, device_end)

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> tuple[int, int]:
        """Return the bytes of the tree and of the device."""
        now = resident_bytes(self._tree.living())
        on_device = self._free_at_start - self._free()
        self._peak = max(self._peak, now)
        self._device_peak = max(self._device_peak, on_device)
        return now, on_device

    def _free(self) -> int:
        return 0 if self._device is None else self._device.free_memory_bytes()
