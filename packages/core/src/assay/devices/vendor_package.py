"""Base of adapters for accelerators that a Python package of their maker adds to torch."""

import importlib
import importlib.util
import platform
from importlib.metadata import entry_points, packages_distributions, version
from types import ModuleType
from typing import ClassVar

import torch

from assay.devices.base import Detection, Vendor
from assay.devices.torch_backend import TorchBackendDevice

# The group of entry points that torch loads.
_AUTOLOADED = "torch.backends"


class VendorPackageDevice(TorchBackendDevice):
    """Base of adapters over a module of torch that `package` registers.

    A subclass sets `kind`, `maker` and `package`, and adds what differs from maker to maker:
    `architecture`, `supported_dtypes` and `effective_precision`. The package is imported when its
    devices are asked for, never before.

    more_packages: others that it needs, and that numbers depend on.
    """

    maker: ClassVar[Vendor]
    package: ClassVar[str]
    more_packages: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def module(cls) -> ModuleType:
        """The module that torch has for this kind of device, once the package is imported.

        Some packages register it when torch loads them, as it does at its own import unless
        TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
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
        """One entry: its devices, or what is missing."""
        missing = cls.missing_software()
        if missing:
            return (Detection(cls.maker, missing=", ".join(missing)),)
        products = cls.products() if cls.is_usable() else ()
        if products:
            return (Detection(cls.maker, products=products, variants=cls.indices()),)
        no_device = f"{cls.maker.title} with a driver that {cls.package} can use"
        return (Detection(cls.maker, missing=no_device),)

    @classmethod
    def missing_software(cls) -> list[str]:
        """What is not installed here, found without importing anything of the maker's."""
        packages = (cls.package, *cls.more_packages)
        return [f"the Python package {name}" for name in packages if not _is_installed(name)]

    @classmethod
    def is_usable(cls) -> bool:
        """Whether the package finds a device and its driver."""
        return bool(cls.module().is_available())

    @property
    def vendor(self) -> Vendor:
        """The constants of its maker."""
        return self.maker

    def versions(self) -> dict[str, str]:
        """Torch, Python, and the maker's packages."""
        packages = [name.partition(".")[0] for name in (self.package, *self.more_packages)]
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: version_of(name) for name in packages},
        }


def version_of(package: str) -> str:
    """Of the distribution that has a top-level package; "unknown" where none says so."""
    names = packages_distributions().get(package, [])
    return version(names[0]) if names else "unknown"


def _is_installed(package: str) -> bool:
    # Only the top level: looking for a submodule would import it.
    return importlib.util.find_spec(package.partition(".")[0]) is not None
