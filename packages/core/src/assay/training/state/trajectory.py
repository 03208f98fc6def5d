"""Compares the end of a free run with the end of the recorded steps."""

import torch
from torch import Tensor, nn

from assay.training.state.parameters import named_parameters
from assay.training.state.records import TrajectoryRecord
from assay.training.state.sharding import whole
from assay.training.state.states import State


def trajectory_of(model: nn.Module, end: State) -> list[TrajectoryRecord]:
    """Measure the distance of each trained parameter of `model` from the end of the recorded steps.

    Distances are medians over elements: an optimizer that divides by the size of a gradient turns the
    rounding of near-zero gradients into whole updates. A collective on several ranks.
    """
    trained = set(end["trainable"])
    return [
        TrajectoryRecord(
            parameter=item.name,
            error=_median((value.double() - end["model"][item.name].double()).abs()),
            size=_median(end["model"][item.name].double().abs()),
        )
        for item in named_parameters(model)
        if item.name in trained
        for value in (whole(item.tensor.detach()).cpu(),)
    ]


def _median(values: Tensor) -> float:
    # torch.median would treat a NaN among finite values as the largest.
    return float(values.median()) if bool(values.isfinite().all()) else float(torch.nan)
