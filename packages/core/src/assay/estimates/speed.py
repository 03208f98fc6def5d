"""The speed of a device, measured in a few tenths of a second."""

import time
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from assay.devices.base import Device

# The probe multiplies a matrix of this many rows and columns by few and by many tokens.
_PROBED_SHAPE = (4096, 4096)
_FEW_TOKENS, _MANY_TOKENS = 4, 256
_PROBED_TIMES = 3

# Seconds of work outside of a model's calls; `nox -s perf -- -k estimates` holds the estimates to measured times.
SECONDS_TO_LOAD = 0.3
SECONDS_PER_LOADED_WEIGHT = 3e-9
SECONDS_PER_STORED_BYTE = 2e-9
SECONDS_PER_COMPARED_VALUE = 1.3e-8


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a device takes for the smallest parts of the work in one dtype."""

    weight: float
    """To read a weight for a few tokens."""
    product: float
    """To multiply a weight by one of many tokens."""

    @classmethod
    def probe(cls, device: Device, dtype: str) -> "Speed":
        """Measure the speed in a few tenths of a second."""
        matrix = torch.rand(_PROBED_SHAPE, dtype=getattr(torch, dtype), device=device.torch_device)
        few, many = (
            _time_of_product(device, matrix, tokens) / matrix.numel()
            for tokens in (_FEW_TOKENS, _MANY_TOKENS)
        )
        return cls(few, max(0.0, many - few) / (_MANY_TOKENS - _FEW_TOKENS))


def _time_of_product(device: Device, matrix: torch.Tensor, num_tokens: int) -> float:
    tokens = torch.ones(num_tokens, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    times = []
    with device.execution():
        for _ in range(_PROBED_TIMES):
            begin = time.perf_counter()
            linear(tokens, matrix)
            device.synchronize()
            times.append(time.perf_counter() - begin)
    return min(times)
