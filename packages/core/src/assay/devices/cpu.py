"""The host's processor, the default reference."""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from assay.devices.base import Detection, DeviceVendor, make_variant_error
from assay.devices.host_memory import (
    available_bytes,
    peak_resident_bytes,
    reset_peak_resident_bytes,
)
from assay.devices.torch_settings import TorchSettings, float32_operand_format

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
