"""NVIDIA GPUs under CUDA and AMD GPUs under ROCm, both of which torch calls "cuda"."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from assay.devices.base import Detection, DeviceVendor
from assay.devices.torch_backend import (
    CUBLAS_WORKSPACE,
    TorchBackendDevice,
    deterministic_algorithms,
    float32_operand_format,
)

NVIDIA = DeviceVendor(
    name="nvidia",
    title="NVIDIA GPU",
    distributed_backend="nccl",
    compile_backend="inductor",
    runner_labels=("assay-nvidia",),
    visible_devices="CUDA_VISIBLE_DEVICES",
    verified="H200",
)
AMD = DeviceVendor(
    name="amd",
    title="AMD GPU under ROCm",
    distributed_backend="nccl",  # torch registers RCCL under this name
    compile_backend="inductor",
    runner_labels=("assay-amd",),
    visible_devices="HIP_VISIBLE_DEVICES",
)

# TF32 needs compute capability 8.0. Source: CUDA C++ Programming Guide, compute capabilities.
_FIRST_MAJOR_WITH_TF32 = 8

_DRIVER_VERSIONS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "amd": Path("/sys/module/amdgpu/version"),
}


class CudaDevice(TorchBackendDevice):
    """One GPU of NVIDIA or AMD through `torch.cuda`."""

    kind = "cuda"

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return one entry per vendor. A torch build supports at most one of them."""
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
    def _detect_built_for(cls, vendor: DeviceVendor) -> Detection:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            products = cls.products() if torch.cuda.is_available() else ()
        if products:
            return Detection(vendor, products=products, variants=cls.indices())
        why = "".join(f" ({warning.message})" for warning in caught)
        return Detection(vendor, missing=f"a {vendor.title} with a driver that torch can use{why}")

    @property
    def vendor(self) -> DeviceVendor:
        """Return AMD if torch was built for ROCm, otherwise NVIDIA."""
        return AMD if torch.version.hip else NVIDIA

    def architecture(self) -> str:
        """Return the compute capability ("sm_90"), or AMD's instruction set ("gfx942")."""
        if self.vendor is AMD:
            name: str = torch.cuda.get_device_properties(self._index).gcnArchName
            return name.partition(":")[0]  # "gfx942:sramecc+:xnack-" appends features
        major, minor = torch.cuda.get_device_capability(self._index)
        return f"sm_{major}{minor}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return all dtypes of a RUN, and bfloat16 only if the hardware has it."""
        with self.execution():
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("float64", "float32", *(("bfloat16",) if has_bfloat16 else ()), "float16")

    def effective_precision(self, dtype: str) -> str:
        """Return TF32 for float32 if settings and hardware allow it, otherwise `dtype`."""
        if dtype != "float32" or not self._has_tf32():
            return dtype
        allowed = float32_operand_format(torch.backends.cuda.matmul)
        # The older setting "medium" means bfloat16 on other devices and TF32 here.
        return "float32" if allowed == "float32" else "tf32"

    def _has_tf32(self) -> bool:
        if self.vendor is AMD:
            # torch lets hipBLASLt use the TF32 of MI300 only with this variable.
            allowed = os.environ.get("HIPBLASLT_ALLOW_TF32") == "1"
            return allowed and self.architecture().startswith("gfx94")
        return torch.cuda.get_device_capability(self._index)[0] >= _FIRST_MAJOR_WITH_TF32

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Use deterministic kernels, a fixed cuBLAS workspace, and no choice of kernels by timing."""
        variable, workspace = CUBLAS_WORKSPACE
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
        """Return the versions of torch, Python, CUDA or HIP, cuDNN or MIOpen, and the driver."""
        platform_name = "hip" if self.vendor is AMD else "cuda"
        found = {
            **super().versions(),
            platform_name: torch.version.hip or torch.version.cuda,
            "miopen" if self.vendor is AMD else "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(self.vendor),
        }
        return {name: str(version) for name, version in found.items() if version}


def _driver_version(vendor: DeviceVendor) -> str:
    try:
        lines = _DRIVER_VERSIONS[vendor.name].read_text().splitlines()
    except OSError:
        return ""
    return lines[0].strip() if lines else ""
