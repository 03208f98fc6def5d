"""Memory of this process and of the machine, as the operating system reports it."""

import os
import resource
import sys
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")

# The highest peak read since the last reset. Linux sums approximate counters over processors, so a
# later reading may be a little lower.
_highest = [0]


def reset_peak_resident_bytes() -> None:
    """Reset the resident peak, where Linux allows it (proc(5), clear_refs, value 5)."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return
    _highest[0] = 0


def peak_resident_bytes() -> int:
    """Return the peak of resident memory since the last reset, or since the process started."""
    from_proc = _kibibyte_field(_PROC / "self/status", "VmHWM")
    if from_proc is not None:
        _highest[0] = max(_highest[0], from_proc)
        return _highest[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2) counts in kibibytes on Linux and in bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping, within the limit of the cgroup."""
    available = _kibibyte_field(_PROC / "meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group_headroom()
    return available if limit is None else min(available, limit)


def _kibibyte_field(path: Path, field: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _control_group_headroom() -> int | None:
    """Return the bytes left in a version 2 cgroup; None without a limit. At least 1, as 0 means unknown."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(1, int(limit) - current + _cached_bytes())


def _cached_bytes() -> int:
    """Return the bytes of cached files in the cgroup, which the kernel drops when memory is short."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
