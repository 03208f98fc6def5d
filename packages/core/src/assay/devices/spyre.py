"""IBM Spyre (AIU), which the package torch_spyre adds to torch as "spyre"."""

import os
from contextlib import AbstractContextManager, nullcontext

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import VendorPackageDevice

SPYRE = DeviceVendor(
    name="spyre",
    title="IBM Spyre (AIU)",
    distributed_backend="spyreccl",
    compile_backend="inductor",
    runner_labels=("assay-spyre",),
    visible_devices="SPYRE_DEVICES",
    measures_memory=False,  # free memory: https://github.com/torch-spyre/torch-spyre/issues/4542
)

# "MOCK" simulates a card.
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
        """Return True if this process can use a card.

        In a process that Python started, a torch_spyre of 2025 reports a card but provides none.
        Source: https://github.com/torch-spyre/torch-spyre/pull/289
        """
        in_bad_fork: bool = cls.module()._is_in_bad_fork()  # noqa: SLF001 - torch requires it
        return not in_bad_fork and super().is_usable()

    @classmethod
    def product_of(cls, index: int) -> str:
        """Return the same name for all cards: torch_spyre reports none."""
        del index
        return f"{SPYRE.title}, simulated" if os.environ.get(_RUNTIME) == "MOCK" else SPYRE.title

    def architecture(self) -> str:
        """Return "spyre": there is one generation."""
        return "spyre"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return float16, the dtype of matrix products."""
        return ("float16",)

    def effective_precision(self, dtype: str) -> str:
        """Return Spyre's format for float16, which has 9 fraction bits instead of 10.

        Source: DataFormats.SEN169_FP16 of torch_spyre, to which float16 maps.
        """
        return "sen169" if dtype == "float16" else dtype

    def execution(self) -> AbstractContextManager[None]:
        """Return an empty context: tensors name their card."""
        return nullcontext()

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the allocator's peak."""
        self.module().memory.reset_peak_memory_stats()

    def peak_memory_bytes(self) -> int:
        """Return the allocator's peak since the reset."""
        return int(self.module().memory.max_memory_allocated())
