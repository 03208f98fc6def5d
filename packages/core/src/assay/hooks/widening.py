"""Widening weights module by module, for a yardstick whose weights do not fit into memory at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.hooks.suspension import suspended
from assay.hooks.tensors import iterate_tensors
from assay.models.load import widen

# Elements of the largest weight that is widened for good, as all norms and biases are.
SMALL_ELEMENTS = 1 << 20


def is_widened_on_use(weight: Tensor) -> bool:
    """Return True if `widen_on_use` widens this weight only while its module runs."""
    return weight.numel() > SMALL_ELEMENTS


def widen_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype`, and widen the large weights of a module only while it runs.

    Memory then holds the narrow weights and those of one module in `dtype`. The results are bitwise
    those of a model that is widened at once.
    """
    scratch = _Scratch(dtype)
    widen(model, dtype, largest=SMALL_ELEMENTS)
    for module in model.modules():
        large = [
            weight
            for weight in module.parameters(recurse=False)
            if weight.is_floating_point() and weight.dtype is not dtype
        ]
        if not large:
            continue
        if type(module).forward is nn.Embedding.forward:
            # It only copies rows, which are exact in both dtypes.
            module.register_forward_hook(lambda _, __, rows: rows.to(dtype))
        else:
            widened = _WidenedWeights(large, scratch)
            module.register_forward_pre_hook(widened.enter)
            module.register_forward_hook(widened.leave, always_call=True)


class _Scratch:
    """Memory in which modules widen their weights, one after the other.

    New memory for each module would take three times as long: the system clears every page of it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Return memory for at least the elements of `like`, (N,)."""
        fitting = [one for one in self._free if one.numel() >= like.numel()]
        if not fitting:
            self._free.clear()
            return torch.empty(like.numel(), dtype=self._dtype, device=like.device)
        memory = min(fitting, key=Tensor.numel)
        self._free = [one for one in self._free if one is not memory]
        return memory

    def give_back(self, taken: Sequence[Tensor]) -> None:
        """Let other modules use memory that was taken."""
        self._free += taken


class _WidenedWeights:
    """Widens weights as a module begins, and restores them as it ends."""

    def __init__(self, weights: Sequence[nn.Parameter], scratch: _Scratch) -> None:
        self._weights, self._scratch = weights, scratch
        self._narrow: list[Tensor] = []
        self._taken: list[Tensor] = []

    def enter(self, *_: Any) -> None:  # noqa: ANN401 - arguments of hooks
        with suspended(), torch.no_grad():
            for weight in self._weights:
                narrow, memory = weight.data, self._scratch.take(weight)
                self._narrow.append(narrow)
                self._taken.append(memory)
                weight.data = memory[: narrow.numel()].view(narrow.shape).copy_(narrow)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        del module, args
        with suspended():
            for weight, narrow in zip(self._weights, self._narrow, strict=True):
                weight.data = narrow
            # A result may be a part of a weight.
            used = {_address(tensor) for _, tensor in iterate_tensors(output, "")}
            self._scratch.give_back([one for one in self._taken if _address(one) not in used])
            self._narrow, self._taken = [], []


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
