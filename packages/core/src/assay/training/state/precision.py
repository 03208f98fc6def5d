"""The precision in which a trainer keeps parameters and moments, as opposed to the compute dtype."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.training.protocol import Trainer
from assay.training.state.parameters import named_parameters
from assay.training.state.sharding import local_part, whole

# Two elements that were both updated in float32 both fit 16 bits by chance once in 2**32.
_FEWEST_ELEMENTS = 2


@dataclass(frozen=True, slots=True)
class KeptPrecision:
    """Names of parameters and moments that are kept in a dtype narrower than float32."""

    parameters: list[str] = field(default_factory=list)
    """Trained parameters without a wider copy in the optimizer."""
    copied: list[str] = field(default_factory=list)
    """Trained parameters with a wider copy in the optimizer."""
    moments: list[str] = field(default_factory=list)
    """Name of the parameter and of the moment, with a space between."""
    rounded: list[str] = field(default_factory=list)
    """Float32 parameters that are rounded between two steps; `rounded_weights` finds them."""


def find_kept_narrow(trainer: Trainer) -> KeptPrecision:
    """Find trained parameters and moments narrower than float32."""
    found = KeptPrecision()
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for item in named_parameters(trainer.model):
        if not item.tensor.requires_grad:
            continue
        moments = trainer.optimizer.state.get(item.tensor, {})
        if _is_narrow(item.tensor):
            candidates = [*moments.values(), *held]
            copied = any(_is_copy(value, item.tensor) for value in candidates)
            (found.copied if copied else found.parameters).append(item.name)
        found.moments.extend(
            f"{item.name} {name}"
            for name, value in moments.items()
            if isinstance(value, Tensor) and value.ndim and _is_narrow(value)
        )
    return found


@contextmanager
def rounded_weights(
    trainer: Trainer, start: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[list[str]]:
    """Yield a list of the wide parameters that the latest optimizer step found rounded to `dtype`.

    An updated weight kept in float32 does not fit a narrower dtype. If all changed elements of a
    parameter do, something rounded them. A collective on several ranks.

    start: parameters before training.
    """
    rounded: list[str] = []

    def look(*_arguments: object) -> None:
        rounded[:] = [
            item.name
            for item in named_parameters(trainer.model)
            if item.tensor.requires_grad
            and not _is_narrow(item.tensor)
            and item.name in start
            and _is_rounded(whole(item.tensor.detach()).cpu(), start[item.name], dtype)
        ]

    handle = trainer.optimizer.register_step_pre_hook(look)
    try:
        yield rounded
    finally:
        handle.remove()


def fits(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of the elements that are exact in `dtype`."""
    return value.to(dtype).to(value.dtype) == value


def _is_rounded(value: Tensor, start: Tensor, dtype: torch.dtype) -> bool:
    changed = value[value != start.cpu().to(value.dtype)]
    return changed.numel() >= _FEWEST_ELEMENTS and bool(fits(changed, dtype).all())


def _is_copy(value: object, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or _is_narrow(value):
        return False
    wide, narrow = local_part(value.detach()), local_part(parameter.detach())
    return wide.shape == narrow.shape and torch.equal(wide.to(narrow.device, narrow.dtype), narrow)


def _is_narrow(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
