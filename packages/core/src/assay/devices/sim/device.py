"""The simulated accelerator as a device."""

from contextlib import AbstractContextManager

from assay.devices.base import Detection, DeviceVendor
from assay.devices.cpu import CpuDevice
from assay.devices.sim.arithmetic import Arithmetic
from assay.devices.sim.mode import simulated_execution
from assay.devices.sim.numerics import DEFAULT_VARIANT, VARIANTS, numerics_of

SIM = DeviceVendor(
    name="sim",
    title="simulated device",
    distributed_backend="gloo",
    compile_backend="eager",
    runner_labels=("assay-cpu",),
    verified="x86_64",
)


class SimDevice(CpuDevice):
    """The host's processor with the products and sums of a variant of `sim.numerics`.

    Memory, seeds and versions are the host's. The compile backend is "eager" because compiled code
    would fuse the simulated operations.
    """

    vendor = SIM

    def __init__(self, variant: str = "") -> None:
        self._numerics = numerics_of(variant)
        self._variant = variant or DEFAULT_VARIANT
        self.name = f"sim:{variant}" if variant else "sim"

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return one device with all variants; it is always present."""
        return (Detection(SIM, products=("simulated on the CPU",), variants=tuple(VARIANTS)),)

    def product(self) -> str:
        """Return the variant and the host's processor."""
        return f"{self._variant} on {super().product()}"

    def architecture(self) -> str:
        """Return the variant, which affects the numbers most."""
        return f"sim-{self._variant}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of the variant. None has float64, like most accelerators."""
        return self._numerics.dtypes

    def effective_precision(self, dtype: str) -> str:
        """Return the format to which the variant rounds operands, otherwise `dtype`."""
        return self._numerics.operands_in(dtype)

    def execution(self) -> AbstractContextManager[None]:
        """Compute products and sums as the variant does inside the context, forward and backward."""
        return simulated_execution(Arithmetic(self._numerics))
