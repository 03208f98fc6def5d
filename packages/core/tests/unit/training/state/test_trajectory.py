import pytest
import torch
from torch import nn

from assay.training.state.parameter_records import trajectory_of

END = {
    "trainable": ["weight"],
    "model": {"weight": torch.full((3, 5), 2.0), "bias": torch.zeros(3)},
}


@pytest.fixture
def model() -> nn.Linear:
    linear = nn.Linear(5, 3)
    with torch.no_grad():
        linear.weight.fill_(2.25)
    return linear


def test_distance_is_that_of_most_elements(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[0, :3] = torch.tensor([2.0, -9.0, 100.0])

    (row,) = trajectory_of(model, END)

    assert (row.parameter, row.error, row.size) == ("weight", 0.25, 2.0)


def test_parameter_that_is_not_finite_is_as_far_as_can_be(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[0, 0] = torch.nan

    assert trajectory_of(model, END)[0].error != trajectory_of(model, END)[0].error
