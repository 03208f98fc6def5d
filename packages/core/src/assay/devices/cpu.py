"""The host's processor: the reference that every machine has."""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from assay.devices.adapter_parts.float32_precision import float32_operand_format
from assay.devices.adapter_parts.host_memory import (
    available_bytes,
    peak_resident_bytes,
    reset_peak_resident_bytes,
)
from assay.devices.adapter_parts.reproducibility import deterministic_algorithms, seed_generators
from assay.devices.base import Detection, UnknownVariantError, Vendor

CPU = Vendor(
    name="cpu",
    title="host processor",
    distributed_backend="gloo",
    compile_backend="inductor",
    runner_labels=("assay-cpu",),
)


class CpuDevice:
    """The host's processor through torch's own CPU kernels."""

    name = "cpu"
    vendor = CPU
    torch_device = "cpu"

    def __init__(self, variant: str = "") -> None:
        if variant:
            raise UnknownVariantError.of("cpu", variant, ())

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Always present."""
        return (Detection(CPU, products=(_processor_name(),)),)

    def count(self) -> int:
        """One, however many cores: torch knows a single CPU device."""
        return 1

    def product(self) -> str:
        """Model name as the operating system gives it."""
        return _processor_name()

    def architecture(self) -> str:
        """Instruction set and the vector extension that torch uses, as in "x86_64-avx512"."""
        return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """All that a model can run in."""
        return ("float64", "float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """What oneDNN is allowed to make of float32 operands; the dtype itself by default."""
        if dtype != "float32":
            return dtype
        return float32_operand_format(getattr(torch.backends.mkldnn, "matmul", None))

    def seed(self, seed: int) -> None:
        """Seed Python's, NumPy's and torch's generators."""
        seed_generators(seed)

    def deterministic(self) -> AbstractContextManager[None]:
        """Deterministic kernels where torch has them."""
        return deterministic_algorithms()

    def execution(self) -> AbstractContextManager[None]:
        """Nothing: the code runs as it is."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing: calls return when they are done."""

    def reset_peak_memory(self) -> None:
        """Start the resident peak of this process anew."""
        reset_peak_resident_bytes()

    def peak_memory_bytes(self) -> int:
        """Resident peak of this process."""
        return peak_resident_bytes()

    def free_memory_bytes(self) -> int:
        """Memory that the operating system can still give."""
        return available_bytes()

    def versions(self) -> dict[str, str]:
        """Torch, Python and the kernel of the operating system."""
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        }


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
