"""Huawei Ascend NPUs, which the package torch_npu adds to torch as "npu"."""

from assay.devices.base import Vendor
from assay.devices.vendor_package import VendorPackageDevice

ASCEND = Vendor(
    name="ascend",
    title="Huawei Ascend",
    distributed_backend="hccl",
    compile_backend="npu",
    runner_labels=("assay-ascend",),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
)


class AscendDevice(VendorPackageDevice):
    """One NPU through `torch.npu`, which has the functions of `torch.cuda`.

    Source: https://www.hiascend.com/document/detail/zh/Pytorch/700/apiref/apilist/ptaoplist_000238.html
    and the pages beside it.
    """

    kind = "npu"
    maker = ASCEND
    package = "torch_npu"

    def architecture(self) -> str:
        """The name of the chip that kernels are built for, as in "ascend910b1"."""
        return self.product().lower()

    def supported_dtypes(self) -> tuple[str, ...]:
        """No float64; bfloat16 where the chip has it."""
        with self.execution():
            has_bfloat16 = self.module().is_bf16_supported()
        return ("float32", *(("bfloat16",) if has_bfloat16 else ()), "float16")

    def effective_precision(self, dtype: str) -> str:
        """HF32 for float32 where it is allowed: by default it is for convolutions alone.

        Source: `torch_npu.npu.matmul.allow_hf32`, ptaoplist_000221 of the same documents.
        """
        return "hf32" if dtype == "float32" and self.module().matmul.allow_hf32 else dtype
