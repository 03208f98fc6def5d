"""The shared part of adapters: seeds, deterministic kernels and precision of torch, modules such as `torch.cuda`.

`VendorPackageDevice` is the base class where a Python package of the vendor adds the module.

torch requires such modules to name their functions as `torch.cuda` does.
"""

import importlib
import importlib.util
import os
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points, packages_distributions, version
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from assay.devices.base import Detection, DeviceVendor, make_absent_error, make_variant_error

# The group of entry points that torch loads.
_AUTOLOADED = "torch.backends"


_NUMPY_SEEDS = 2**32
_OTHER_LIBRARIES = ("tensorflow", "jax", "cupy")

# cuBLAS adds up in one order only with a workspace of fixed size. It reads the variable when a process
# first uses it. Source: cuBLAS documentation, 2.1.4 "Results reproducibility".
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_FORMATS = {"tf32": "tf32", "bf16": "bfloat16"}
_OLDER_SETTINGS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


def seed_all(seed: int) -> list[str]:
    """Seed every random generator, and make torch use deterministic kernels where it has them.

    Returns:
        Sentences about what could not be controlled.

    >>> assay.seed_all(0)  # doctest: +SKIP
    ['set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run']
    """
    seed_generators(seed)
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    variable, workspace = CUBLAS_WORKSPACE
    found = []
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        found.append(
            "set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run"
        )
    if torch.cuda.is_available() and variable not in os.environ:
        if torch.cuda.is_initialized():
            found.append(
                f"set {variable}={workspace} before Python starts: cuBLAS is in use already"
            )
        else:
            os.environ[variable] = workspace
    found += [f"{name} has separate generators" for name in _OTHER_LIBRARIES if name in sys.modules]
    if torch.get_num_threads() > 1:
        found.append(
            f"torch uses {torch.get_num_threads()} threads: with another number, sums differ in their last bits"
        )
    return found


def seed_generators(seed: int) -> None:
    """Seed the generators of Python and NumPy, and those of torch on every device."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)  # noqa: NPY002 - model code draws from this generator
    torch.manual_seed(seed)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use deterministic kernels inside this context where torch has them.

    Operations without one only warn. New memory stays uninitialized: torch's default in this mode
    would write every tensor once more.
    """
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    # The same setting as torch.use_deterministic_algorithms, whose import takes a second.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


class TorchSettings:
    """Methods of the device protocol that are alike for all devices of torch."""

    def seed(self, seed: int) -> None:
        """Seed the generators of Python, NumPy and torch, on all devices."""
        seed_generators(seed)

    def deterministic(self) -> AbstractContextManager[None]:
        """Use deterministic kernels inside the context where torch has them."""
        return deterministic_algorithms()

    def versions(self) -> dict[str, str]:
        """Return the versions of torch and Python."""
        return {"torch": torch.__version__, "python": platform.python_version()}


def float32_operand_format(matmul_settings: object) -> str:
    """Return the format that settings such as `torch.backends.cuda.matmul` allow for float32 operands.

    The caller checks that the hardware has the format. torch 2.9 added one setting per backend, which
    also reflects the older global one; reading the older one after setting a newer one raises there.
    """
    setting = getattr(matmul_settings, "fp32_precision", None)
    if setting is None:
        setting = _OLDER_SETTINGS[torch.get_float32_matmul_precision()]
    return _FORMATS.get(setting, "float32")


class TorchBackendDevice(TorchSettings):
    """Base class of adapters over torch's module called `kind`.

    A subclass sets `kind` and `maker`, and implements `architecture`, `supported_dtypes`,
    `effective_precision` and `missing_device`.
    """

    kind: ClassVar[str]
    maker: ClassVar[DeviceVendor]

    def __init__(self, variant: str = "") -> None:
        if variant and not variant.isdecimal():
            raise make_variant_error(self.kind, variant, self.indices())
        self.name = f"{self.kind}:{variant}" if variant else self.kind
        self._index = int(variant or 0)
        if self._index >= self.count():
            here = ", ".join(f"{self.kind}:{index}" for index in self.indices())
            raise make_absent_error(self.name, f"there are {self.count()}", here or "none")

    @classmethod
    def module(cls) -> ModuleType:
        """Return torch's module for this kind of device."""
        module: ModuleType = getattr(torch, cls.kind)
        return module

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return one entry: the devices, or what is missing."""
        products = cls.products() if cls.is_usable() else ()
        if products:
            return (Detection(cls.maker, products=products, variants=cls.indices()),)
        return (Detection(cls.maker, missing=cls.missing_device()),)

    @classmethod
    def is_usable(cls) -> bool:
        """Return True if torch finds a device and its driver."""
        return bool(cls.module().is_available())

    @classmethod
    def missing_device(cls) -> str:
        """Say what is missing if no device is found."""
        raise NotImplementedError

    @classmethod
    def indices(cls) -> tuple[str, ...]:
        """Return the index of every device that this process can use."""
        return tuple(str(index) for index in range(cls.module().device_count()))

    @classmethod
    def products(cls) -> tuple[str, ...]:
        """Return the product name of every device that this process can use."""
        return tuple(cls.product_of(int(index)) for index in cls.indices())

    @classmethod
    def product_of(cls, index: int) -> str:
        """Return the product name of one device."""
        return str(cls.module().get_device_name(index))

    @property
    def vendor(self) -> DeviceVendor:
        """Return the constants of the vendor."""
        return self.maker

    @property
    def torch_device(self) -> str:
        """Return the name with an index, so that it does not follow the current device."""
        return f"{self.kind}:{self._index}"

    def count(self) -> int:
        """Count the devices of this kind that this process can use."""
        return int(self.module().device_count())

    def product(self) -> str:
        """Return the product name."""
        return self.product_of(self._index)

    def execution(self) -> AbstractContextManager[None]:
        """Make this device the current one of its kind inside the context."""
        current: AbstractContextManager[None] = self.module().device(self._index)
        return current

    def synchronize(self) -> None:
        """Wait for all streams of this device."""
        self.module().synchronize(self._index)

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak of torch's allocator."""
        if self.vendor.measures_memory:
            self.module().reset_peak_memory_stats(self._index)

    def peak_memory_bytes(self) -> int:
        """Return the peak of torch's allocator since the reset; 0 if unknown."""
        if not self.vendor.measures_memory:
            return 0
        return int(self.module().max_memory_allocated(self._index))

    def free_memory_bytes(self) -> int:
        """Return the memory that the driver reports as free; 0 if unknown."""
        if not self.vendor.measures_memory:
            return 0
        return int(self.module().mem_get_info(self._index)[0])


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
