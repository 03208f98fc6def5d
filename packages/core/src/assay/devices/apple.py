"""Apple GPUs, which torch itself has as "mps"."""

import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from assay.devices.base import Detection, Vendor
from assay.devices.torch_backend import TorchBackendDevice

APPLE = Vendor(
    name="apple",
    title="Apple GPU",
    distributed_backend="gloo",
    compile_backend="inductor",
    runner_labels=("assay-apple",),
    measures_memory=False,
)


class AppleDevice(TorchBackendDevice):
    """The one GPU of a Mac through `torch.mps`, whose functions take no index.

    Source: https://docs.pytorch.org/docs/stable/notes/mps.html and mps.html beside it.
    """

    kind = "mps"
    vendor = APPLE

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """One entry: the GPU, or what is missing."""
        if torch.backends.mps.is_available():
            return (Detection(APPLE, products=cls.products(), variants=cls.indices()),)
        missing = "a Mac with an Apple GPU, macOS 14 or later, and a torch built for MPS"
        return (Detection(APPLE, missing=missing),)

    @classmethod
    def products(cls) -> tuple[str, ...]:
        """The name that Metal has for it."""
        return tuple(_metal_name() for _ in cls.indices())

    def product(self) -> str:
        """The name that Metal has for it, as in "Apple M3 Max"."""
        return _metal_name()

    def architecture(self) -> str:
        """Generation of the chip, as in "apple-m3-max"."""
        return self.product().lower().replace(" ", "-")

    def supported_dtypes(self) -> tuple[str, ...]:
        """No float64."""
        return ("float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """As asked for."""
        return dtype

    def execution(self) -> AbstractContextManager[None]:
        """There is one device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all work."""
        self.module().synchronize()

    def reset_peak_memory(self) -> None:
        """Nothing is measured: torch tells what is in use now, and no peak."""

    def peak_memory_bytes(self) -> int:
        """0, not known."""
        return 0

    def free_memory_bytes(self) -> int:
        """What torch recommends to use, less what the driver has given it."""
        return int(self.module().recommended_max_memory() - self.module().driver_allocated_memory())

    def versions(self) -> dict[str, str]:
        """Torch, Python, macOS."""
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "macos": platform.mac_ver()[0] or "unknown",
        }


def _metal_name() -> str:
    """The title where torch is too old to tell: its documents of 2.7 lack the function."""
    tell = getattr(torch.backends.mps, "get_name", None)
    return str(tell()) if tell else APPLE.title
