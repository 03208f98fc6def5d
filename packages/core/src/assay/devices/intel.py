"""Intel GPUs, which torch calls "xpu"."""

import torch

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import TorchBackendDevice

INTEL = DeviceVendor(
    name="intel",
    title="Intel GPU",
    distributed_backend="xccl",
    compile_backend="inductor",
    runner_labels=("assay-intel",),
    visible_devices="ZE_AFFINITY_MASK",
)


class IntelDevice(TorchBackendDevice):
    """One GPU through `torch.xpu`.

    Source: https://docs.pytorch.org/docs/stable/xpu.html
    """

    kind = "xpu"
    maker = INTEL

    @classmethod
    def missing_device(cls) -> str:
        """Name the GPU, its driver and the build of torch."""
        return f"an Intel GPU with a driver, and a torch built for XPU; this one is {torch.__version__}"

    def architecture(self) -> str:
        """Return SYCL's number of the architecture, such as "xpu-0x5004004"."""
        number = self.module().get_device_capability(self._index)["architecture"]
        return f"xpu-{number:#x}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return float32, float16, and float64 and bfloat16 if the hardware has them."""
        with self.execution():
            has_float64 = self.module().get_device_properties(self._index).has_fp64
            has_bfloat16 = self.module().is_bf16_supported(including_emulation=False)
        return (
            *(("float64",) if has_float64 else ()),
            "float32",
            *(("bfloat16",) if has_bfloat16 else ()),
            "float16",
        )

    def effective_precision(self, dtype: str) -> str:
        """Return TF32 for float32 if oneDNN may use it and the hardware has it, else `dtype`.

        XPU kernels read only this setting of mkldnn. The others concern the host.
        Source: aten/src/ATen/native/mkldnn/xpu/detail/Matmul.cpp of https://github.com/pytorch/pytorch
        """
        allowed = dtype == "float32" and torch.backends.mkldnn.allow_tf32
        return "tf32" if allowed and self.module().is_tf32_supported() else dtype

    def versions(self) -> dict[str, str]:
        """Return the versions of torch, Python and the driver."""
        driver = self.module().get_device_properties(self._index).driver_version
        return {**super().versions(), "driver": str(driver)}
