"""Widening weights module by module, for a yardstick whose weights do not fit into memory at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.hooks.suspension import suspended

# Elements up to which a weight is widened for good, as all norms and biases are.
SMALL_ELEMENTS = 1 << 20


def widen_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype`, and widen the large weights of a module only while it runs.

    Memory then holds the narrow weights and those of one module in `dtype`. The results are bitwise
    those of a model that is widened at once.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() <= SMALL_ELEMENTS:
                parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)  # noqa: SLF001 - keeps persistence
    for module in model.modules():
        large = [p for p in module.parameters(recurse=False) if p.dtype.itemsize < dtype.itemsize]
        large = [p for p in large if p.is_floating_point()]
        if not large:
            continue
        if type(module).forward is nn.Embedding.forward:
            module.register_forward_hook(
                lambda _, __, rows: rows.to(dtype)
            )  # rows are copied exactly
        else:
            widened = _WidenedWeights(large, dtype)
            module.register_forward_pre_hook(widened.enter)
            module.register_forward_hook(widened.leave, always_call=True)


class _WidenedWeights:
    """Widens weights as a module begins, and restores them as it ends."""

    def __init__(self, weights: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._narrow: list[Tensor] = []

    def enter(self, *_: Any) -> None:  # noqa: ANN401 - arguments of hooks
        with suspended():
            self._narrow = [weight.data for weight in self._weights]
            for weight in self._weights:
                weight.data = weight.data.to(self._dtype)

    def leave(self, *_: Any) -> None:  # noqa: ANN401 - arguments of hooks
        with suspended():
            for weight, narrow in zip(self._weights, self._narrow, strict=True):
                weight.data = narrow
            self._narrow = []
