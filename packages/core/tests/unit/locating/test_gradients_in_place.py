"""Backward, replayed, of calls that change their arguments in place."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packages.core.tests.unit.locating.plants import do_nothing
from packages.core.tests.unit.locating.test_gradients import (
    Rig,
    assert_gradients_are_plain,
    wrap_forward,
)


class _ChangesInPlace(nn.Module):
    """Has its argument changed by a child, which goes on computing with it, and uses it after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.child = _Doubles()

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.linear(hidden_states)
        squares = self.child(inner)
        squares[:, ::2] = inner[:, ::2].mean(1, keepdim=True)
        result: Tensor = inner.masked_scatter(squares > 1, squares) + squares
        return result


class _Doubles(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        value.mul_(2)
        return value * value


@pytest.fixture(scope="module")
def in_place_rig(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model = copy.deepcopy(llama)
    torch.manual_seed(2)
    model.model.layers[0].mlp = _ChangesInPlace()
    return Rig(model, tmp_path_factory.mktemp("in-place") / "yardstick", torch.float32)


@pytest.fixture(scope="module")
def caching_rig(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("caching")
    return Rig(llama, folder / "yardstick", torch.float32, use_cache=True)


@pytest.mark.parametrize("name", ["in_place_rig", "caching_rig"])
def test_what_a_call_changes_in_place_goes_through_backward(
    request: pytest.FixtureRequest, name: str
) -> None:
    rig = request.getfixturevalue(name)

    assert_gradients_are_plain(rig)
    assert rig.failed(do_nothing) == set()


def test_gradient_lost_by_what_a_call_changes_in_place_is_found_there(in_place_rig: Rig) -> None:
    def detach(_module: Any, value: Tensor, _original: Any) -> Tensor:
        value.mul_(2)
        return (value * value).detach()

    plant = wrap_forward("model.layers.0.mlp.child", detach)
    assert in_place_rig.failed(plant) == {("model.layers.0.mlp.child", "backward")}
