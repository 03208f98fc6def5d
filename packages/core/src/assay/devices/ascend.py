"""Huawei Ascend NPUs, which the package torch_npu adds to torch as "npu"."""

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import VendorPackageDevice

ASCEND = DeviceVendor(
    name="ascend",
    title="Huawei Ascend",
    distributed_backend="hccl",
    compile_backend="npu",
    runner_labels=("assay-ascend",),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
)


class AscendDevice(VendorPackageDevice):
    """One NPU through `torch.npu`, which has the functions of `torch.cuda`.

    Source: torch_npu/npu/__init__.py of https://github.com/Ascend/pytorch
    """

    kind = "npu"
    maker = ASCEND
    package = "torch_npu"

    def architecture(self) -> str:
        """Return the name of the chip, such as "ascend910b1"."""
        return self.product().lower()

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return float32, float16, and bfloat16 if the chip has it."""
        with self.execution():
            has_bfloat16 = self.module().is_bf16_supported()
        return ("float32", *(("bfloat16",) if has_bfloat16 else ()), "float16")

    def effective_precision(self, dtype: str) -> str:
        """Return HF32 for float32 where it is allowed, and float16 on chips before Ascend910B1.

        By default HF32 is allowed for convolutions but not for matrix products.
        Source: https://www.hiascend.com/document/detail/zh/Pytorch/720/apiref/torchnpuCustomsapi/context/torch_npu-npu-matmul-allow_hf32.md
        Chips before Ascend910B1 lack bfloat16.
        Source: IsAllowFP32ToFP16 and IsBF16Supported of https://github.com/Ascend/pytorch
        """
        if dtype != "float32":
            return dtype
        if not self.module().is_bf16_supported():
            return "float16"
        return "hf32" if self.module().matmul.allow_hf32 else "float32"
