"""The speed of a device, measured in a few seconds at most."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assay.devices.base import Device
from assay.estimates.products import Product

_FEW_TOKENS, _MANY_TOKENS, _MOST_TOKENS = 4, 64, 4096
_PROBED_TIMES = 2

# Weights of one shape that the probe multiplies, in elements: more than caches hold.
_PROBED_ELEMENTS = 1 << 24

# Values of a large tensor, for which memory is not kept.
_NEW_VALUES = 1 << 22

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
    """To read a weight and multiply it by many tokens, for each token."""

    @classmethod
    def probe(
        cls, device: Device, dtype: str, products: Sequence[Product], stored: str | None = None
    ) -> "Speed":
        """Measure the speed of a model's `products`.

        stored: the dtype from which weights are widened to `dtype` before each use; None for `dtype`.
        """
        weights = _Weights(device, getattr(torch, dtype), getattr(torch, stored or dtype))
        total = sum(one.count * one.num_weights for one in products)

        def time_of(num_tokens: int) -> float:
            return sum(one.count * weights.time(one, num_tokens) for one in products) / total

        few, num_tokens = time_of(_FEW_TOKENS), _MANY_TOKENS
        # A GPU takes as long for 64 tokens as for 4: it reads the weights meanwhile.
        while (many := time_of(num_tokens)) < 2 * few and num_tokens < _MOST_TOKENS:
            num_tokens *= 4
        return cls(few, many / num_tokens)


class _Weights:
    """Memory for weights of any shape, and products with them."""

    def __init__(self, device: Device, dtype: torch.dtype, stored: torch.dtype) -> None:
        self._device = device
        place = device.torch_device
        self._stored = torch.ones(_PROBED_ELEMENTS, dtype=stored, device=place)
        self._widened = None if stored is dtype else self._stored.to(dtype)
        self._dtype = dtype

    def time(self, product: Product, num_tokens: int) -> float:
        """Return the seconds of a product of this many tokens with one weight."""
        share = min(1.0, _PROBED_ELEMENTS / product.num_weights)
        shape = (product.shape[0], max(1, int(product.shape[1] * share)))
        size = shape[0] * shape[1]
        parts = self._stored[: _PROBED_ELEMENTS // size * size].split(size)[: product.count]
        tokens = torch.ones(num_tokens, shape[0], dtype=self._dtype, device=self._stored.device)
        times = []
        with self._device.execution():
            for _ in range(_PROBED_TIMES):
                begin = time.perf_counter()
                for part in parts:
                    used = part
                    if self._widened is not None:
                        used = self._widened[:size].copy_(part)
                    rows = used.view(shape[::-1]).t() if product.is_transposed else used.view(shape)
                    torch.mm(tokens, rows)
                self._device.synchronize()
                times.append(time.perf_counter() - begin)
        return min(times) / len(parts) / size * product.num_weights


def seconds_per_new_value(device: Device, dtype: str) -> float:
    """Measure how long a sum of two numbers takes if its result needs new memory.

    The system clears that memory first, which may take ten times as long as the sum.
    """
    values = torch.ones(_NEW_VALUES, dtype=getattr(torch, dtype), device=device.torch_device)
    times = []
    for _ in range(_PROBED_TIMES):
        begin = time.perf_counter()
        torch.add(values, values)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times) / _NEW_VALUES
