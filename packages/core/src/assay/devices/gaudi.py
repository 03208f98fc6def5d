"""Intel Gaudi, which the package habana_frameworks adds to torch as "hpu"."""

import importlib
import os

from assay.devices.base import Vendor
from assay.devices.vendor_package import VendorPackageDevice

GAUDI = Vendor(
    name="gaudi",
    title="Intel Gaudi",
    distributed_backend="hccl",
    compile_backend="hpu_backend",
    runner_labels=("assay-gaudi",),
    visible_devices="HABANA_VISIBLE_MODULES",
)

# "0" runs each operation at once, "1" gathers them into graphs, which was the default up to 1.19 at least.
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
        """The generation, as in "gaudi2"."""
        return self.product().lower()

    def supported_dtypes(self) -> tuple[str, ...]:
        """No float64; float16 from the second generation on."""
        first = self.architecture() == "gaudi"
        return ("float32", "bfloat16", *(() if first else ("float16",)))

    def effective_precision(self, dtype: str) -> str:
        """As asked for: operands are cast inside of autocast alone."""
        return dtype

    def synchronize(self) -> None:
        """Start what lazy mode has gathered, and wait for it; torch.hpu.synchronize takes no device.

        Source: https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html and
        accelerator/hpu_accelerator.py of https://github.com/deepspeedai/DeepSpeed
        """
        with self.execution():
            if os.environ.get(_LAZY_MODE) != "0":
                importlib.import_module(f"{self.package}.core").mark_step()
            self.module().synchronize()
