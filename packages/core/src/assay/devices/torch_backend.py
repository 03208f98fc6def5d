"""Base class of adapters for accelerators with a module in torch, such as `torch.cuda`.

torch requires such modules to name their functions as `torch.cuda` does.
"""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import ClassVar

import torch

from assay.devices.base import Detection, DeviceVendor, make_absent_error, make_variant_error
from assay.devices.torch_settings import TorchSettings


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
