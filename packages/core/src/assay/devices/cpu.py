"""The host's processor, the default reference."""

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
    # Inductor takes minutes to compile the kernels of forward and backward, a short run seconds.
    training_compile_backend="aot_eager",
    verified="x86_64",
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
        """One device, which is always present."""
        return (Detection(CPU, products=(_processor_name(),)),)

    def count(self) -> int:
        """1, however many cores: torch has a single CPU device."""
        return 1

    def product(self) -> str:
        """Model name from the operating system."""
        return _processor_name()

    def architecture(self) -> str:
        """Instruction set and the vector extension that torch uses, as in "x86_64-avx512"."""
        return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """All dtypes that a model can run in."""
        return ("float64", "float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """For float32 the format that oneDNN may round operands to; otherwise `dtype`."""
        if dtype != "float32":
            return dtype
        return float32_operand_format(getattr(torch.backends.mkldnn, "matmul", None))

    def seed(self, seed: int) -> None:
        """Seed Python's, NumPy's and torch's generators."""
        seed_generators(seed)

    def deterministic(self) -> AbstractContextManager[None]:
        """Inside, torch uses deterministic kernels where it has them."""
        return deterministic_algorithms()

    def execution(self) -> AbstractContextManager[None]:
        """An empty context: the host's arithmetic is unchanged."""
        return nullcontext()

    def synchronize(self) -> None:
        """Return at once: operations on the host end before their call returns."""

    def reset_peak_memory(self) -> None:
        """Start a new measurement of this process's resident peak."""
        reset_peak_resident_bytes()

    def peak_memory_bytes(self) -> int:
        """Most resident memory of this process since the reset."""
        return peak_resident_bytes()

    def free_memory_bytes(self) -> int:
        """Memory that the operating system can still allocate."""
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
