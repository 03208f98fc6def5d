"""Apple GPUs, which torch calls "mps"."""

import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import TorchBackendDevice

APPLE = DeviceVendor(
    name="apple",
    title="Apple GPU",
    distributed_backend="gloo",
    compile_backend="inductor",
    runner_labels=("assay-apple",),
    measures_memory=False,
)


class AppleDevice(TorchBackendDevice):
    """The GPU of a Mac through `torch.mps`, whose functions take no index.

    Source: https://docs.pytorch.org/docs/stable/notes/mps.html and https://docs.pytorch.org/docs/stable/mps.html
    """

    kind = "mps"
    maker = APPLE

    @classmethod
    def is_usable(cls) -> bool:
        """Return True if torch can use the GPU."""
        return torch.backends.mps.is_available()

    @classmethod
    def missing_device(cls) -> str:
        """Name the machine, the system and the build of torch."""
        return "a Mac with an Apple GPU, macOS 14 or later, and a torch built for MPS"

    @classmethod
    def product_of(cls, index: int) -> str:
        """Return Metal's name of the GPU, such as "Apple M3 Max"."""
        del index
        # torch 2.7 lacks the function.
        get_name = getattr(torch.backends.mps, "get_name", None)
        return str(get_name()) if get_name else APPLE.title

    def architecture(self) -> str:
        """Return the generation of the chip, such as "apple-m3-max"."""
        return self.product().lower().replace(" ", "-")

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return all dtypes but float64."""
        return ("float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """Return `dtype`."""
        return dtype

    def execution(self) -> AbstractContextManager[None]:
        """Return an empty context: a Mac has one GPU."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all work."""
        self.module().synchronize()

    def free_memory_bytes(self) -> int:
        """Return the memory that torch recommends to use, less what the driver has allocated."""
        return int(self.module().recommended_max_memory() - self.module().driver_allocated_memory())

    def versions(self) -> dict[str, str]:
        """Return the versions of torch, Python and macOS."""
        return {**super().versions(), "macos": platform.mac_ver()[0] or "unknown"}
