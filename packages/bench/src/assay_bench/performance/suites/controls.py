"""How fast this machine multiplies matrices and reads memory, measured between rounds.

A round's time divided by a control's, taken moments before, does not change with the machine's clock
or with what else runs on it as much as the time itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from assay.devices.base import Device

# Rows of the square matrices. On the host a product takes milliseconds; an accelerator reaches its
# peak only with larger ones.
_HOST_SIZE = 512
_ACCELERATOR_SIZE = 8192

# More than the caches hold; accelerators read as much in a fraction of a millisecond, and get more.
_HOST_BYTES = 1 << 26
_ACCELERATOR_BYTES = 1 << 30


def timed(work: Callable[[], object], device: Device) -> float:
    """Seconds until `work` and all that it submitted to `device` are done."""
    device.synchronize()
    begun = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class ControlTimes:
    """Seconds of one product and of one pass over memory."""

    matmul: float
    read: float


class Controls:
    """Two measurements of `device`, in `dtype`, with as many threads as torch has now.

    matmul_flops: floating-point operations of the product. read_bytes: what the pass reads.
    """

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        is_host = device.torch_device == "cpu"
        size = _HOST_SIZE if is_host else _ACCELERATOR_SIZE
        self.matmul_flops = 2 * size**3
        self.read_bytes = _HOST_BYTES if is_host else _ACCELERATOR_BYTES
        self._device = device
        self._left, self._right = (
            torch.ones(size, size, dtype=dtype, device=device.torch_device) for _ in range(2)
        )
        # Whatever dtype the model runs in: float32 is summed at the speed of memory everywhere.
        self._memory = torch.ones(
            self.read_bytes // 4, dtype=torch.float32, device=device.torch_device
        )

    def measure(self) -> ControlTimes:
        """Time both once; called before every round."""
        return ControlTimes(
            matmul=timed(lambda: self._left @ self._right, self._device),
            read=timed(self._memory.sum, self._device),
        )
