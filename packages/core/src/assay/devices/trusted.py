"""The device of a trusted run, which may compute products faster than the candidate's kernels do."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from assay.devices.base import Device
from assay.devices.cpu import CpuDevice
from assay.devices.sim.arithmetic import Arithmetic
from assay.devices.sim.mode import replaced_products
from assay.devices.sim.numerics import Numerics

# Below this size, replacing an operation takes longer than the product.
_FEWEST_PARAMETERS = 20_000_000


def trusted_device(device: Device, dtype: str, num_parameters: int) -> Device:
    """Return `device`, or a faster one with the same rounding, for a trusted run in `dtype`."""
    has_instructions = _INSTRUCTIONS.get(dtype, lambda: True)
    if num_parameters < _FEWEST_PARAMETERS or type(device) is not CpuDevice or has_instructions():
        return device
    return _Float32Products()


# Tests for instructions of the processor.
_INSTRUCTIONS: dict[str, Callable[[], bool]] = {
    "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,  # noqa: SLF001 - there is no public name
    "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,  # noqa: SLF001
}


class _Float32Products(CpuDevice):
    """The host's processor, with products of 16-bit numbers computed in float32 and rounded once.

    So do torch's own kernels, but at a sixth of the speed on a processor without instructions for
    the dtype (AVX2, two cores: 17 instead of 105 GFLOP/s).
    """

    def execution(self) -> AbstractContextManager[None]:
        """Replace products by those in float32 inside the context."""
        return replaced_products(Arithmetic(Numerics()))
