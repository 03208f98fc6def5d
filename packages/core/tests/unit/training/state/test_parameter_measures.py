"""In which precision a trainer keeps what it trains."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from assay.training.protocol import Trainer
from assay.training.reports import KeptPrecision
from assay.training.state.parameter_measures import (
    Untouched,
    find_kept_narrow,
    fits,
    rounded_weights,
    trajectory_of,
)

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


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.ones(3, 2, 2))
        self.plain = nn.Parameter(torch.ones(2, 2))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_what_no_step_reached_is_named_expert_by_expert() -> None:
    model, untouched = Experts(), Untouched()
    for expert in (0, 2):
        model.zero_grad()
        (model.stacked[expert].sum() + model.plain[0].sum()).backward()
        untouched.add(model)

    assert untouched.names == ["stacked.1", "unused"]


def test_nothing_is_named_where_all_were_reached() -> None:
    model, untouched = Experts(), Untouched()
    (model.stacked.sum() + model.plain.sum() + model.unused.sum()).backward()
    untouched.add(model)

    assert untouched.names == []


BFLOAT16 = torch.bfloat16


def trainer(dtype: torch.dtype, moments: torch.dtype | None = None) -> Trainer:
    """A layer of which the bias is frozen, after one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight], lr=0.01)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = optimizer.state[model.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].to(moments or dtype)
    made: Any = SimpleNamespace(model=model, optimizer=optimizer)
    return cast("Trainer", made)


def with_copy(value: Tensor) -> Trainer:
    made = trainer(BFLOAT16, torch.float32)
    state = made.optimizer.state[made.model.get_parameter("weight")]
    state["exp_avg"] = state["exp_avg"].float()
    state["master"] = value
    return made


def test_what_is_kept_in_float32_is_not_narrow() -> None:
    assert find_kept_narrow(trainer(torch.float32)) == KeptPrecision()
    assert find_kept_narrow(trainer(torch.float64)) == KeptPrecision()


def test_moment_in_16_bits_is_narrow_beside_a_wide_parameter() -> None:
    assert find_kept_narrow(trainer(torch.float32, BFLOAT16)) == KeptPrecision(
        moments=["weight exp_avg_sq"]
    )


def test_parameter_in_16_bits_is_narrow_without_a_wide_copy_of_it() -> None:
    weight = trainer(BFLOAT16).model.get_parameter("weight").detach()

    assert find_kept_narrow(trainer(BFLOAT16)).parameters == ["weight"]
    # A copy rounds to the parameter: between two numbers of 16 bits is room for many.
    copied = find_kept_narrow(with_copy(weight.float() * (1 + 2.0**-11)))
    assert copied == KeptPrecision(copied=["weight"])
    assert find_kept_narrow(with_copy(weight.float() * 1.1)).parameters == ["weight"]
    assert find_kept_narrow(with_copy(weight.clone())).parameters == ["weight"]


def test_optimizer_that_holds_the_wide_copies_itself_has_them() -> None:
    made = trainer(BFLOAT16)
    copy = nn.Parameter(made.model.get_parameter("weight").detach().float())
    made.optimizer = torch.optim.AdamW([copy], lr=0.01)

    assert find_kept_narrow(made) == KeptPrecision(copied=["weight"])


@pytest.mark.parametrize("rounds", [False, True])
def test_weights_that_are_rounded_between_two_steps_are_found_by_the_next(*, rounds: bool) -> None:
    made = trainer(torch.float32)
    weight = made.model.get_parameter("weight")
    start = {"weight": weight.detach().clone()}

    with rounded_weights(made, start, BFLOAT16) as rounded:
        made.optimizer.step()
        if rounds:
            with torch.no_grad():
                weight.copy_(weight.bfloat16())
        made.optimizer.step()
    made.optimizer.step()

    assert rounded == ["weight"] * rounds


def test_weights_that_nothing_changes_are_not_rounded() -> None:
    made = trainer(torch.float32)
    with torch.no_grad():
        made.model.get_parameter("weight").fill_(1.0)
    made.optimizer.param_groups[0].update(lr=0.0)

    with rounded_weights(made, {"weight": torch.ones(3, 4)}, BFLOAT16) as rounded:
        made.optimizer.step()

    assert rounded == []


def test_value_fits_where_it_is_one_of_the_dtype() -> None:
    values = torch.tensor([0.0, 1.0, 1.0 + 2.0**-7, 1.0 + 2.0**-8, 3e38])

    assert fits(values, BFLOAT16).tolist() == [True, True, True, False, False]
