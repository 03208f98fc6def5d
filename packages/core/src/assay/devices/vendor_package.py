"""Base class of adapters for accelerators that a vendor's Python package adds to torch."""

import importlib
import importlib.util
from importlib.metadata import entry_points, packages_distributions, version
from types import ModuleType
from typing import ClassVar

import torch

from assay.devices.base import Detection
from assay.devices.torch_backend import TorchBackendDevice

# The group of entry points that torch loads.
_AUTOLOADED = "torch.backends"


class VendorPackageDevice(TorchBackendDevice):
    """Base class of adapters over a torch module that `package` registers.

    A subclass sets `kind`, `maker` and `package`, and implements `architecture`, `supported_dtypes`
    and `effective_precision`. The package is imported only when its devices are asked for.
    """

    package: ClassVar[str]
    more_packages: ClassVar[tuple[str, ...]] = ()
    """Other packages that the device needs. Their versions are recorded too."""

    @classmethod
    def module(cls) -> ModuleType:
        """Import the package, and return torch's module for this kind of device.

        Some packages register the module only when torch loads them. torch does so at its own import
        unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
        Source: https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
        """
        importlib.import_module(cls.package)
        if not hasattr(torch, cls.kind):
            for found in entry_points(group=_AUTOLOADED):
                if found.module == cls.package:
                    found.load()()
        return super().module()

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return one entry: the devices, or what is missing."""
        if missing := cls.missing_software():
            return (Detection(cls.maker, missing=", ".join(missing)),)
        return super().detect()

    @classmethod
    def missing_software(cls) -> list[str]:
        """List what is not installed, without importing the vendor's packages."""
        packages = (cls.package, *cls.more_packages)
        return [f"the Python package {name}" for name in packages if not _is_installed(name)]

    @classmethod
    def missing_device(cls) -> str:
        """Name the device and its driver."""
        return f"{cls.maker.title} with a driver that {cls.package} can use"

    def versions(self) -> dict[str, str]:
        """Return the versions of torch, Python and the vendor's packages."""
        packages = [name.partition(".")[0] for name in (self.package, *self.more_packages)]
        return {**super().versions(), **{name: version_of(name) for name in packages}}


def version_of(package: str) -> str:
    """Return the version of the distribution with this top-level package, or "unknown"."""
    names = packages_distributions().get(package, [])
    return version(names[0]) if names else "unknown"


def _is_installed(package: str) -> bool:
    # Only the top level: looking for a submodule would import it.
    return importlib.util.find_spec(package.partition(".")[0]) is not None
