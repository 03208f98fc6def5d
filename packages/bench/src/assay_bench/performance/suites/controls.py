"""Controls: the machine's own matrix product and memory read, measured between rounds.

The ratio of a round to a control just before it depends less on the clock rate and on other work than the
time itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from assay.devices.base import Device

# Rows of the square matrices. A product takes milliseconds on the host. An accelerator needs larger matrices
# to reach its peak.
_HOST_SIZE = 512
_ACCELERATOR_SIZE = 8192

# Larger than the caches. An accelerator reads 64 MiB in a fraction of a millisecond, so it gets more.
_HOST_BYTES = 1 << 26
_ACCELERATOR_BYTES = 1 << 30


def timed(work: Callable[[], object], device: Device) -> float:
    """Return the seconds until `work` and its operations on `device` are done."""
    device.synchronize()
    begun = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class ControlTimes:
    """Seconds of one matrix product and of one pass over memory."""

    matmul: float
    read: float


class Controls:
    """The controls of `device`. The product runs in `dtype`."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        is_host = device.torch_device == "cpu"
        size = _HOST_SIZE if is_host else _ACCELERATOR_SIZE
        self.matmul_flops = 2 * size**3
        self.read_bytes = _HOST_BYTES if is_host else _ACCELERATOR_BYTES
        self._device = device
        self._left, self._right = (
            torch.ones(size, size, dtype=dtype, device=device.torch_device) for _ in range(2)
        )
        # Always float32, whose sum runs at the speed of memory on every device.
        self._memory = torch.ones(
            self.read_bytes // 4, dtype=torch.float32, device=device.torch_device
        )

    def measure(self) -> ControlTimes:
        """Time both controls once; called before every round."""
        return ControlTimes(
            matmul=timed(lambda: self._left @ self._right, self._device),
            read=timed(self._memory.sum, self._device),
        )
