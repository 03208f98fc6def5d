"""Intel GPUs, which torch itself has as "xpu"."""

import platform

import torch

from assay.devices.base import Detection, Vendor
from assay.devices.torch_backend import TorchBackendDevice

INTEL = Vendor(
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
    vendor = INTEL

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """One entry: its devices, or what is missing."""
        products = cls.products() if cls.module().is_available() else ()
        if products:
            return (Detection(INTEL, products=products, variants=cls.indices()),)
        missing = f"an Intel GPU with a driver, and a torch built for XPU; this one is {torch.__version__}"
        return (Detection(INTEL, missing=missing),)

    def architecture(self) -> str:
        """The number that SYCL has for it, as in "xpu-0x5004004"."""
        number = self.module().get_device_capability(self._index)["architecture"]
        return f"xpu-{number:#x}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """float64 and bfloat16 where the hardware has them."""
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
        """TF32 for float32 if oneDNN may use it and the hardware has it.

        Kernels of this device ask for this setting alone; the others of mkldnn are for the host.
        Source: aten/src/ATen/native/mkldnn/xpu/detail/Matmul.cpp of https://github.com/pytorch/pytorch
        """
        allowed = dtype == "float32" and torch.backends.mkldnn.allow_tf32
        return "tf32" if allowed and self.module().is_tf32_supported() else dtype

    def versions(self) -> dict[str, str]:
        """Torch, Python, and the driver."""
        driver = self.module().get_device_properties(self._index).driver_version
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "driver": str(driver),
        }
