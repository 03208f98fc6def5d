"""Intel Gaudi, which the package habana_frameworks adds to torch as "hpu"."""

import importlib
import os

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import VendorPackageDevice

GAUDI = DeviceVendor(
    name="gaudi",
    title="Intel Gaudi",
    distributed_backend="hccl",
    compile_backend="hpu_backend",
    runner_labels=("assay-gaudi",),
    visible_devices="HABANA_VISIBLE_MODULES",
)

# "0" runs each operation at once. "1" collects operations into graphs, the default at least up to 1.19.
# Source: https://docs.habana.ai/en/v1.19.0/PyTorch/Reference/Runtime_Flags.html and the same page of `latest`
_LAZY_MODE = "PT_HPU_LAZY_MODE"


class GaudiDevice(VendorPackageDevice):
    """One Gaudi through `torch.hpu`.

    Source: https://docs.habana.ai/en/latest/PyTorch/Reference/Python_Packages.html
    """

    kind = "hpu"
    maker = GAUDI
    package = "habana_frameworks.torch"

    def architecture(self) -> str:
        """Return the generation, such as "gaudi2"."""
        return self.product().lower()

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return float32, bfloat16, and float16 from the second generation on."""
        first = self.architecture() == "gaudi"
        return ("float32", "bfloat16", *(() if first else ("float16",)))

    def effective_precision(self, dtype: str) -> str:
        """Return `dtype`: operands are cast only inside autocast."""
        return dtype

    def synchronize(self) -> None:
        """Start the operations that lazy mode has collected, and wait for them.

        torch.hpu.synchronize takes no device.
        Source: https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html and
        accelerator/hpu_accelerator.py of https://github.com/deepspeedai/DeepSpeed
        """
        with self.execution():
            if os.environ.get(_LAZY_MODE) != "0":
                importlib.import_module(f"{self.package}.core").mark_step()
            self.module().synchronize()
