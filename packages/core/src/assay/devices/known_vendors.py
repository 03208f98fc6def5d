"""Makers whose devices assay knows of and has no adapter for yet.

Whoever registers an adapter for one of them under `assay.devices` replaces its line here.
Read in the vendors' own documents: the modules, "hccl" of both, "spyreccl" and Spyre's compile
backend. Nobody has verified the other backends yet; whoever writes an adapter does.
"""

import importlib.util
from dataclasses import dataclass

from assay.devices.base import Vendor


@dataclass(frozen=True, slots=True)
class KnownVendor:
    """A maker, the name torch gives its devices, and the module that makes torch know them."""

    vendor: Vendor
    device: str
    module: str | None

    def missing(self) -> str:
        """What this machine lacks, found out without importing anything of the vendor's."""
        adapter = f"an adapter (entry point {self.device!r} of assay.devices)"
        if self.module is None or _is_installed(self.module):
            return adapter
        return f"the Python module {self.module} and {adapter}"


def _is_installed(module: str) -> bool:
    # The parent package alone: looking for a submodule would import it.
    return importlib.util.find_spec(module.partition(".")[0]) is not None


KNOWN_VENDORS = (
    KnownVendor(
        Vendor("intel", "Intel GPU", "xccl", "inductor", ("assay-intel",)),
        device="xpu",
        module=None,
    ),
    KnownVendor(
        Vendor("gaudi", "Intel Gaudi", "hccl", "hpu_backend", ("assay-gaudi",)),
        device="hpu",
        module="habana_frameworks.torch",
    ),
    KnownVendor(
        Vendor("spyre", "IBM Spyre (AIU)", "spyreccl", "inductor", ("assay-spyre",)),
        device="spyre",
        module="torch_spyre",
    ),
    KnownVendor(
        Vendor("trainium", "AWS Trainium", "xla", "openxla", ("assay-trainium",)),
        device="xla",
        module="torch_neuronx",
    ),
    KnownVendor(
        Vendor("ascend", "Huawei Ascend", "hccl", "npu", ("assay-ascend",)),
        device="npu",
        module="torch_npu",
    ),
)
