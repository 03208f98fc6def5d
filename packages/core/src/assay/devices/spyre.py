"""IBM Spyre (AIU), which the package torch_spyre adds to torch as "spyre"."""

from contextlib import AbstractContextManager, nullcontext

from assay.devices.base import Vendor
from assay.devices.vendor_package import VendorPackageDevice

SPYRE = Vendor(
    name="spyre",
    title="IBM Spyre (AIU)",
    distributed_backend="spyreccl",
    compile_backend="inductor",
    runner_labels=("assay-spyre",),
    measures_memory=False,
)


class SpyreDevice(VendorPackageDevice):
    """One card through `torch.spyre`, which has few of the functions of `torch.cuda`.

    Only one process at a time can use the card.
    Source: torch_spyre/__init__.py of https://github.com/torch-spyre/torch-spyre
    """

    kind = "spyre"
    maker = SPYRE
    package = "torch_spyre"

    @classmethod
    def products(cls) -> tuple[str, ...]:
        """One name for all: torch_spyre tells none."""
        return tuple(SPYRE.title for _ in cls.indices())

    def product(self) -> str:
        """The same for all cards."""
        return SPYRE.title

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
        """Nothing is measured."""

    def peak_memory_bytes(self) -> int:
        """Not told."""
        return 0

    def free_memory_bytes(self) -> int:
        """Not told."""
        return 0
