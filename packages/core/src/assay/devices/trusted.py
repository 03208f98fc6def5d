"""The device of a trusted run, which may compute products faster than the candidate's kernels do."""

from contextlib import AbstractContextManager

import torch

from assay.devices.base import Device
from assay.devices.cpu import CpuDevice
from assay.devices.sim import Arithmetic, Numerics, ReplacedProducts
from assay.dtypes import float_format

# In a smaller model, Python takes a large part of the time, and a replaced operation takes more of it.
_FEWEST_PARAMETERS = 20_000_000


def trusted_device(device: Device, dtype: str, num_parameters: int) -> Device:
    """Return `device`, or a faster one with the same rounding, for a trusted run in `dtype`."""
    if (
        type(device) is CpuDevice
        and float_format(dtype).is_narrow
        and num_parameters >= _FEWEST_PARAMETERS
        # AVX-512 has instructions that oneDNN uses. Other processors were not measured.
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return _Float32Products()
    return device


class _Float32Products(CpuDevice):
    """The host's processor, with products of 16-bit numbers computed in float32 and rounded once.

    torch's own kernels round once, too, but are slow without instructions for the dtype.
    """

    def execution(self) -> AbstractContextManager[None]:
        """Replace products by those in float32 inside the context."""
        return ReplacedProducts(Arithmetic(Numerics()))
