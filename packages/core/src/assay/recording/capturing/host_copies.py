"""Copies of tensors in host memory, from a bounded pool of buffers."""

from dataclasses import dataclass, field
from threading import Condition

import torch
from torch import Tensor

_SMALLEST_BYTES = 4096


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy that the device may not have finished."""

    value: Tensor
    buffer: Tensor
    arrived: torch.Event | None

    def wait(self) -> Tensor:
        """Return the values when they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.value


@dataclass
class HostCopies:
    """Makes copies of at most `max_bytes` at a time; `copy` waits for the release of earlier ones.

    A larger tensor waits for all others. Buffers are reused: new memory costs more than a copy.
    """

    max_bytes: int
    _free: dict[tuple[int, bool], list[Tensor]] = field(default_factory=dict)
    _used_bytes: int = 0
    _free_bytes: int = 0
    _changed: Condition = field(default_factory=Condition)

    @property
    def used_bytes(self) -> int:
        """Bytes of copies that are in use."""
        return self._used_bytes

    def copy(self, tensor: Tensor) -> HostCopy:
        """Copy a strided tensor in row-major order, on an accelerator after its queued work.

        On another stream than the current one, a later change in place could overtake the copy.
        """
        on_accelerator = tensor.device.type != "cpu"
        num_bytes = tensor.numel() * tensor.element_size()
        buffer = self._take(_round_up(num_bytes), on_accelerator)
        value = buffer[:num_bytes].view(tensor.dtype).view(tensor.shape)
        value.copy_(tensor, non_blocking=True)
        arrived = None
        if on_accelerator:
            arrived = torch.accelerator.current_stream(tensor.device).record_event()
        return HostCopy(value, buffer, arrived)

    def release(self, copy: HostCopy) -> None:
        """Return the buffer of a copy to the pool."""
        size = copy.buffer.numel()
        with self._changed:
            self._used_bytes -= size
            self._free_bytes += size
            self._free.setdefault((size, copy.arrived is not None), []).append(copy.buffer)
            self._changed.notify_all()

    def _take(self, size: int, on_accelerator: bool) -> Tensor:  # noqa: FBT001 - of private use
        with self._changed:
            self._changed.wait_for(
                lambda: self._used_bytes + size <= self.max_bytes or not self._used_bytes
            )
            self._used_bytes += size
            if free := self._free.get((size, on_accelerator)):
                self._free_bytes -= size
                return free.pop()
            if self._used_bytes + self._free_bytes > self.max_bytes:
                self._free.clear()
                self._free_bytes = 0
        return torch.empty(size, dtype=torch.uint8, pin_memory=on_accelerator)


def _round_up(num_bytes: int) -> int:
    """Round up to one of eight sizes between two powers of two."""
    step = 1 << max(num_bytes.bit_length() - 4, 0)
    return max(-(-num_bytes // step) * step, _SMALLEST_BYTES)
