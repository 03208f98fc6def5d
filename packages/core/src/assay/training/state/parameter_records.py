"""Measures parameters for a report: the parts that ranks hold, where a run ends, and what has no gradient."""

import math

import torch
from torch import Tensor, nn

from assay.training.protocol import Trainer
from assay.training.state.files import hash_value
from assay.training.state.parameters import named_parameters
from assay.training.state.records import HeldPart, TrajectoryRecord
from assay.training.state.sharding import coordinates_of, local_part, whole
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
