"""How much memory a run takes at most, and whether it gives it back."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
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
    """Bytes in use before a run, at most during it, and after its tear-down."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int

    def is_back(self, slack_bytes: int) -> bool:
        """Whether tear-down gave back all but `slack_bytes` of what the run took."""
        return self.end_bytes <= self.start_bytes + slack_bytes

    def __str__(self) -> str:
        left = self.end_bytes - self.start_bytes
        kept = f", {in_words(left)} not given back" if left > 0 else ""
        return f"{in_words(self.peak_bytes - self.start_bytes)} at most{kept}"


def in_words(size_bytes: int) -> str:
    """A size in the largest unit of which there is at least one."""
    size, unit = float(size_bytes), 0
    while abs(size) >= _STEP and unit + 1 < len(_UNITS):
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size == int(size) else f"{size:.1f} {_UNITS[unit]}"


def resident_bytes(processes: "Iterable[psutil.Process]") -> int:
    """The resident memory of all processes; what several share is counted once, where known."""
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
    """Samples the memory of a process tree, and of a device, while its block runs.

    On the device it is what all processes together have taken since the block began: the driver
    tells no more. The start of the tree is the memory of the processes that it has by then.

    host, device: after the block; `device` is None for none, for the host as a device, and for one
        whose maker does not tell what is free.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Bytes of the tree and of the device now."""
        now = resident_bytes(self._tree.living())
        on_device = self._free_at_start - self._free()
        self._peak = max(self._peak, now)
        self._device_peak = max(self._device_peak, on_device)
        return now, on_device

    def _free(self) -> int:
        return 0 if self._device is None else self._device.free_memory_bytes()
