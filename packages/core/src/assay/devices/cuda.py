"""NVIDIA GPUs under CUDA and AMD GPUs under ROCm, both of which are "cuda" in torch."""

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from assay.devices.adapter_parts.float32_precision import float32_operand_format
from assay.devices.adapter_parts.reproducibility import deterministic_algorithms
from assay.devices.base import Detection, Vendor
from assay.devices.torch_backend import TorchBackendDevice

NVIDIA = Vendor(
    name="nvidia",
    title="NVIDIA GPU",
    distributed_backend="nccl",
    compile_backend="inductor",
    runner_labels=("assay-nvidia",),
    visible_devices="CUDA_VISIBLE_DEVICES",
    verified="H200",
)
AMD = Vendor(
    name="amd",
    title="AMD GPU under ROCm",
    # RCCL is registered in torch as "nccl".
    distributed_backend="nccl",
    compile_backend="inductor",
    runner_labels=("assay-amd",),
    visible_devices="HIP_VISIBLE_DEVICES",
)

# TF32 came with compute capability 8.0. Source: CUDA C++ Programming Guide, compute capabilities.
_FIRST_MAJOR_WITH_TF32 = 8

# cuBLAS adds up in one order only with a workspace of fixed size. Source: cuBLAS, 2.1.4
# "Results reproducibility"; it is read when a process first uses the library.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_DRIVER_VERSIONS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "amd": Path("/sys/module/amdgpu/version"),
}


class CudaDevice(TorchBackendDevice):
    """One GPU of NVIDIA or AMD through `torch.cuda`."""

    kind = "cuda"

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """One entry for each of the two vendors: a torch build serves at most one of them."""
        builds = ((NVIDIA, "CUDA", torch.version.cuda), (AMD, "ROCm", torch.version.hip))
        return tuple(
            cls._detect_built_for(vendor)
            if built_for
            else Detection(
                vendor,
                missing=f"a torch built for {platform_name}; this one is {torch.__version__}",
            )
            for vendor, platform_name, built_for in builds
        )

    @classmethod
    def _detect_built_for(cls, vendor: Vendor) -> Detection:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            products = cls.products() if torch.cuda.is_available() else ()
        if products:
            return Detection(vendor, products=products, variants=cls.indices())
        why = "".join(f" ({warning.message})" for warning in caught)
        return Detection(vendor, missing=f"a {vendor.title} with a driver that torch can use{why}")

    @property
    def vendor(self) -> Vendor:
        """AMD if torch was built for ROCm, otherwise NVIDIA."""
        return AMD if torch.version.hip else NVIDIA

    def architecture(self) -> str:
        """Compute capability as in "sm_90", for AMD the instruction set as in "gfx942"."""
        if self.vendor is AMD:
            # "gfx942:sramecc+:xnack-" names features after the instruction set.
            name: str = torch.cuda.get_device_properties(self._index).gcnArchName
            return name.partition(":")[0]
        major, minor = torch.cuda.get_device_capability(self._index)
        return f"sm_{major}{minor}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """All dtypes of a RUN, but bfloat16 only where the hardware has it."""
        with self.execution():
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("float64", "float32", *(("bfloat16",) if has_bfloat16 else ()), "float16")

    def effective_precision(self, dtype: str) -> str:
        """TF32 for float32 if the settings allow it and the hardware has it; otherwise `dtype`."""
        if dtype != "float32" or not self._has_tf32():
            return dtype
        allowed = float32_operand_format(torch.backends.cuda.matmul)
        # The setting "medium" of older versions means bfloat16 elsewhere, and TF32 here.
        return "float32" if allowed == "float32" else "tf32"

    def _has_tf32(self) -> bool:
        if self.vendor is AMD:
            # MI300 has TF32, but torch lets hipBLASLt use it only with this variable.
            allowed = os.environ.get("HIPBLASLT_ALLOW_TF32") == "1"
            return allowed and self.architecture().startswith("gfx94")
        return torch.cuda.get_device_capability(self._index)[0] >= _FIRST_MAJOR_WITH_TF32

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Inside: deterministic kernels, a fixed cuBLAS workspace, no choice of kernels by timing."""
        variable, workspace = _WORKSPACE
        outer = os.environ.get(variable)
        benchmark = torch.backends.cudnn.benchmark
        os.environ.setdefault(variable, workspace)
        torch.backends.cudnn.benchmark = False
        try:
            with deterministic_algorithms():
                yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            if outer is None:
                os.environ.pop(variable, None)

    def versions(self) -> dict[str, str]:
        """Torch, Python, the CUDA or HIP that torch was built for, cuDNN or MIOpen, the driver."""
        platform_name = "hip" if self.vendor is AMD else "cuda"
        found = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            platform_name: torch.version.hip or torch.version.cuda,
            "miopen" if self.vendor is AMD else "cudnn": _cudnn_version(),
            "driver": _driver_version(self.vendor),
        }
        return {name: str(version) for name, version in found.items() if version}


def _cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()
    return version


def _driver_version(vendor: Vendor) -> str:
    """The first line of the kernel module's version file; "" if there is none."""
    try:
        lines = _DRIVER_VERSIONS[vendor.name].read_text().splitlines()
    except OSError:
        return ""
    return lines[0].strip() if lines else ""
