"""Base of adapters for accelerators with a module in torch, such as `torch.cuda`.

torch requires such modules to have the functions of `torch.cuda` by the same names, so that a
vendor's adapter adds little more than its name and its dtypes.
"""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import ClassVar

import torch

from assay.devices.adapter_parts.reproducibility import deterministic_algorithms, seed_generators
from assay.devices.base import AbsentDeviceError, UnknownVariantError


class TorchBackendDevice:
    """Base of adapters over torch's module called `kind`.

    A subclass sets `kind` and adds what differs from vendor to vendor: `detect`, `vendor`,
    `architecture`, `supported_dtypes`, `effective_precision` and `versions`.
    """

    kind: ClassVar[str]

    def __init__(self, variant: str = "") -> None:
        if variant and not variant.isdecimal():
            raise UnknownVariantError.of(self.kind, variant, self.indices())
        self.name = f"{self.kind}:{variant}" if variant else self.kind
        self._index = int(variant or 0)
        if self._index >= self.count():
            here = ", ".join(f"{self.kind}:{index}" for index in self.indices())
            raise AbsentDeviceError.of(self.name, f"there are {self.count()}", here or "none")

    @classmethod
    def module(cls) -> ModuleType:
        """The module that torch has for this kind of device."""
        module: ModuleType = getattr(torch, cls.kind)
        return module

    @classmethod
    def indices(cls) -> tuple[str, ...]:
        """The index of every device that this process can use."""
        return tuple(str(index) for index in range(cls.module().device_count()))

    @classmethod
    def products(cls) -> tuple[str, ...]:
        """The product name of every device that this process can use."""
        return tuple(str(cls.module().get_device_name(int(index))) for index in cls.indices())

    @property
    def torch_device(self) -> str:
        """Always with its index, so that it does not follow the current device."""
        return f"{self.kind}:{self._index}"

    def count(self) -> int:
        """Number of devices of this kind that this process can use."""
        return int(self.module().device_count())

    def product(self) -> str:
        """Name of the product, from the driver."""
        return str(self.module().get_device_name(self._index))

    def seed(self, seed: int) -> None:
        """Seed Python's, NumPy's and torch's generators, those of all devices included."""
        seed_generators(seed)

    def deterministic(self) -> AbstractContextManager[None]:
        """Inside, torch uses deterministic kernels where it has them."""
        return deterministic_algorithms()

    def execution(self) -> AbstractContextManager[None]:
        """Inside, this device is the current one of its kind."""
        current: AbstractContextManager[None] = self.module().device(self._index)
        return current

    def synchronize(self) -> None:
        """Wait for all streams of this device."""
        self.module().synchronize(self._index)

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak of torch's allocator."""
        self.module().reset_peak_memory_stats(self._index)

    def peak_memory_bytes(self) -> int:
        """Most memory of torch's allocator in use by tensors since the reset."""
        return int(self.module().max_memory_allocated(self._index))

    def free_memory_bytes(self) -> int:
        """Memory that is free according to the driver, other processes included."""
        return int(self.module().mem_get_info(self._index)[0])
