"""Measures parameters for a report: where a run ends, what ranks hold, in which precision."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from assay.training.protocol import Trainer
from assay.training.reports import HeldPart, KeptPrecision, TrajectoryRecord
from assay.training.state.files import hash_value
from assay.training.state.parameters import coordinates_of, local_part, named_parameters, whole
from assay.training.state.states import State


def hash_held_parts(trainer: Trainer) -> dict[HeldPart, str]:
    """Hash this rank's part of every parameter and of its optimizer moments."""
    held = {}
    for item in named_parameters(trainer.model):
        values = {None: item.tensor.detach(), **trainer.optimizer.state.get(item.tensor, {})}
        for moment, value in values.items():
            if isinstance(value, Tensor):
                part = HeldPart(item.name, moment, coordinates_of(value))
                held[part] = hash_value(local_part(value))
    return held


def trajectory_of(model: nn.Module, end: State) -> list[TrajectoryRecord]:
    """Measure the distance of each trained parameter of `model` from the end of the recorded steps.

    Distances are medians over elements: an optimizer that divides by the size of a gradient turns the
    rounding of near-zero gradients into whole updates. A collective on several ranks.
    """
    trained = set(end["trainable"])
    return [
        TrajectoryRecord(
            parameter=item.name,
            error=_median(value.to(torch.float64, copy=True).sub_(end["model"][item.name]).abs_()),
            size=_median(end["model"][item.name].abs()),
        )
        for item in named_parameters(model)
        if item.name in trained
        for value in (whole(item.tensor.detach()).cpu(),)
    ]


def _median(values: Tensor) -> float:
    # torch.median would treat a NaN among finite values as the largest.
    is_finite = math.isfinite(values.sum(dtype=torch.float64))
    return float(values.median()) if is_finite else math.nan


# Parameters with this many dims are stacked: the first dim counts experts.
_STACKED = 3


class Untouched:
    """Collects the parameters over the steps of a run. Call `add` after each, with gradients in place."""

    def __init__(self) -> None:
        # By name; a flag for each expert of a stacked parameter, else a single flag.
        self._reached: dict[str, Tensor] = {}

    def add(self, model: nn.Module) -> None:
        """Take the gradients of one step."""
        for item in named_parameters(model):
            if item.tensor.requires_grad:
                reached = _reached(item.tensor)
                self._reached[item.name] = reached | self._reached.get(item.name, reached)

    @property
    def names(self) -> list[str]:
        """Parameters without gradient; stacked ones by expert: `experts.down_proj.3`."""
        return [
            name if reached.ndim == 0 else f"{name}.{index}"
            for name, reached in self._reached.items()
            for index in (~reached.reshape(-1)).nonzero()[:, 0].tolist()
        ]


def _reached(parameter: Tensor) -> Tensor:
    """Return True for a nonzero gradient, by expert for a stacked parameter."""
    stacked = parameter.ndim >= _STACKED
    if parameter.grad is None:
        return torch.zeros(parameter.shape[:1] if stacked else (), dtype=torch.bool)
    nonzero = (parameter.grad != 0).cpu()
    return nonzero.flatten(1).any(1) if stacked else nonzero.any()


# Two elements that were both updated in float32 both fit 16 bits by chance once in 2**32.
_FEWEST_ELEMENTS = 2


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
