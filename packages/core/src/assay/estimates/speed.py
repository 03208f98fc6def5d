"""The time that passes of a model take, from its size and the speed of one product on the device."""

import time
from dataclasses import dataclass

import torch

from assay.devices.base import Device

# The probed matrix has more weights than caches hold.
_ROWS, _COLUMNS = 4096, 4096
_FEW_TOKENS, _MANY_TOKENS = 4, 64

# Approximate seconds of work outside of products, on x86-64 with two cores. A model is loaded and its
# weights are hashed; hooks of a module run Python; the errors of a value are summed.
SECONDS_PER_LOADED_WEIGHT = 1e-8
SECONDS_PER_MODULE_CALL = 3e-4
SECONDS_PER_STORED_BYTE = 2e-9
SECONDS_PER_COMPARED_VALUE = 1.3e-8


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a device takes for the weights of a model in one dtype."""

    weight: float
    """To read a weight in a call of a few tokens."""
    product: float
    """To multiply a weight by one of many tokens."""

    @classmethod
    def probe(cls, device: Device, dtype: str, stored: str | None = None) -> "Speed":
        """Measure products of tokens with one matrix.

        stored: the dtype from which weights are widened to `dtype` before each use; None for `dtype`.
        """
        place, computed = device.torch_device, getattr(torch, dtype)
        narrow = torch.ones(_ROWS, _COLUMNS, dtype=getattr(torch, stored or dtype), device=place)
        weights = narrow if stored is None else torch.empty_like(narrow, dtype=computed)

        def measure(num_tokens: int) -> float:
            tokens = torch.ones(num_tokens, _COLUMNS, dtype=computed, device=place)
            times = []
            for _ in range(2):  # the first product prepares the device
                begin = time.perf_counter()
                if weights is not narrow:
                    weights.copy_(narrow)
                torch.mm(tokens, weights.t())
                device.synchronize()
                times.append(time.perf_counter() - begin)
            return min(times) / weights.numel()

        with device.execution():
            return cls(measure(_FEW_TOKENS), measure(_MANY_TOKENS) / _MANY_TOKENS)
