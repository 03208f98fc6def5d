"""The host's processor, the default reference."""

import os
import platform
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from assay.devices.base import Detection, DeviceVendor, make_variant_error
from assay.devices.torch_backend import TorchSettings, float32_operand_format

CPU = DeviceVendor(
    name="cpu",
    title="host processor",
    distributed_backend="gloo",
    compile_backend="inductor",
    runner_labels=("assay-cpu",),
    # Inductor takes minutes to compile forward and backward kernels for a run of seconds.
    training_compile_backend="aot_eager",
    verified="x86_64",
)


class CpuDevice(TorchSettings):
    """The host's processor through torch's own CPU kernels."""

    name = "cpu"
    vendor = CPU
    torch_device = "cpu"

    def __init__(self, variant: str = "") -> None:
        if variant:
            raise make_variant_error("cpu", variant, ())

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return the processor, which is always present."""
        return (Detection(CPU, products=(_processor_name(),)),)

    def count(self) -> int:
        """Return 1: torch has a single CPU device."""
        return 1

    def product(self) -> str:
        """Return the model name from the operating system."""
        return _processor_name()

    def architecture(self) -> str:
        """Return the instruction set and the vector extension that torch uses ("x86_64-avx512")."""
        return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return all dtypes that a model can run in."""
        return ("float64", "float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """Return the format to which oneDNN may round float32 operands, otherwise `dtype`."""
        if dtype != "float32":
            return dtype
        return float32_operand_format(getattr(torch.backends.mkldnn, "matmul", None))

    def execution(self) -> AbstractContextManager[None]:
        """Return an empty context: the host's arithmetic is unchanged."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: operations on the host finish before their call returns."""

    def reset_peak_memory(self) -> None:
        """Start a new measurement of this process's resident peak."""
        reset_peak_resident_bytes()

    def peak_memory_bytes(self) -> int:
        """Return the peak of this process's resident memory since the reset."""
        return peak_resident_bytes()

    def free_memory_bytes(self) -> int:
        """Return the memory that the operating system can still allocate."""
        return available_bytes()

    def versions(self) -> dict[str, str]:
        """Return the versions of torch, Python and the kernel."""
        return {**super().versions(), "system": f"{platform.system()} {platform.release()}"}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


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
