"""IBM Spyre (AIU), which the package torch_spyre adds to torch as "spyre"."""

import os
from contextlib import AbstractContextManager, nullcontext

from assay.devices.base import Vendor
from assay.devices.vendor_package import VendorPackageDevice

SPYRE = Vendor(
    name="spyre",
    title="IBM Spyre (AIU)",
    distributed_backend="spyreccl",
    compile_backend="inductor",
    runner_labels=("assay-spyre",),
    visible_devices="SPYRE_DEVICES",
    measures_memory=False,
)

# "MOCK" is a simulation without a card.
# Source: https://torch-spyre.readthedocs.io/en/latest/runtime/index.html
_RUNTIME = "FLEX_DEVICE"


class SpyreDevice(VendorPackageDevice):
    """One card through `torch.spyre`, which has few of the functions of `torch.cuda`.

    Source: https://torch-spyre.readthedocs.io/en/latest/api/torch_spyre.html
    """

    kind = "spyre"
    maker = SPYRE
    package = "torch_spyre"

    @classmethod
    def is_usable(cls) -> bool:
        """Whether there is a card, and this process may use it.

        To each process that Python started a torch_spyre of 2025 says that there is one, and gives none.
        Source: https://github.com/torch-spyre/torch-spyre/pull/289
        """
        is_kept_from_it: bool = cls.module()._is_in_bad_fork()  # noqa: SLF001 - torch requires it
        return not is_kept_from_it and super().is_usable()

    @classmethod
    def products(cls) -> tuple[str, ...]:
        """One name for all: torch_spyre tells none."""
        return tuple(_title() for _ in cls.indices())

    def product(self) -> str:
        """The same for all cards."""
        return _title()

    def architecture(self) -> str:
        """The same for all cards: there is one generation."""
        return "spyre"

    def supported_dtypes(self) -> tuple[str, ...]:
        """The dtype of its matrix products."""
        return ("float16",)

    def effective_precision(self, dtype: str) -> str:
        """Its own format, with 9 bits of significand behind the point where float16 has 10.

        Source: DataFormats.SEN169_FP16 of torch_spyre, which float16 maps to.
        """
        return "sen169" if dtype == "float16" else dtype

    def execution(self) -> AbstractContextManager[None]:
        """The card that tensors name."""
        return nullcontext()

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak of its allocator."""
        self.module().memory.reset_peak_memory_stats()

    def peak_memory_bytes(self) -> int:
        """Most memory of its allocator in use since the reset."""
        return int(self.module().memory.max_memory_allocated())

    def free_memory_bytes(self) -> int:
        """0, not known: https://github.com/torch-spyre/torch-spyre/issues/4542 asks for it."""
        return 0


def _title() -> str:
    return f"{SPYRE.title}, simulated" if os.environ.get(_RUNTIME) == "MOCK" else SPYRE.title
