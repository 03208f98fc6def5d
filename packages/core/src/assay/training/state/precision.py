"""In which precision a trainer keeps what it trains, beside the dtype that it computes in."""

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
class KeptNarrow:
    """What a trainer keeps in a dtype narrower than float32.

    parameters: trained ones of which the optimizer has no wider copy either; copied: those of which
        it has one. moments: name of the parameter and of the moment.
    """

    parameters: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)


def find_kept_narrow(trainer: Trainer) -> KeptNarrow:
    """What of the trained parameters and of the optimizer's state is narrower than float32."""
    found = KeptNarrow()
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
    """The wide parameters that the last optimizer step inside finds rounded to `dtype`.

    start: what they were before training. An updated weight that is kept in float32 does not fit a
    narrower dtype; all changed elements of these do, so something has rounded them in between.
    A collective on several ranks.
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
    """Which elements of `value` lose nothing in `dtype`, bool."""
    return value.to(dtype).to(value.dtype) == value


def _is_rounded(value: Tensor, start: Tensor, dtype: torch.dtype) -> bool:
    changed = value[value != start.cpu().to(value.dtype)]
    return changed.numel() >= _FEWEST_ELEMENTS and bool(fits(changed, dtype).all())


def _is_copy(value: object, parameter: Tensor) -> bool:
    """Whether `value` is the parameter in a wider dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or _is_narrow(value):
        return False
    wide, narrow = local_part(value.detach()), local_part(parameter.detach())
    return wide.shape == narrow.shape and torch.equal(wide.to(narrow.device, narrow.dtype), narrow)


def _is_narrow(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
