"""Makers of devices for which assay has no adapter yet.

An adapter that a package registers under `assay.devices` replaces the maker's line here.
From the vendors' own documents: the modules, "hccl" of both, "spyreccl" and Spyre's compile
backend. The other backends are unverified until there is an adapter.
"""

import importlib.util
from dataclasses import dataclass

from assay.devices.base import Vendor


@dataclass(frozen=True, slots=True)
class KnownVendor:
    """A maker, the name of its devices in torch, and the module that registers them there."""

    vendor: Vendor
    device: str
    module: str | None

    def missing(self) -> str:
        """What this machine lacks; found without importing the vendor's module."""
        adapter = f"an adapter (entry point {self.device!r} of assay.devices)"
        if self.module is None or _is_installed(self.module):
            return adapter
        return f"the Python module {self.module} and {adapter}"


def _is_installed(module: str) -> bool:
    # Only the top-level package: looking for a submodule would import it.
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
