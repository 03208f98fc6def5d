"""Results and arguments under replay: their parts, dtypes and shapes, and changes in place."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from packages.core.tests.unit.replay.conftest import MakeRig, Rig
from packages.core.tests.unit.replay.plants import do_nothing, replace_forward


class Nest(nn.Module):
    """A child with a tuple result, one part of which a variant may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Pair()

    def forward(self, input_ids: Tensor) -> Any:
        return 2 * self.child(input_ids.to(self.child.weight.dtype))[0]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x * self.weight, x + self.weight


NUMBERS = torch.arange(64.0).reshape(1, 8, 8)


@pytest.fixture
def nest_rig(make_rig: MakeRig) -> Rig:
    return make_rig(Nest(), lambda model: model(NUMBERS))


def test_parts_of_a_tuple_that_one_side_leaves_out_are_not_compared(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _module, original, x: (original(x)[0], None))

    results = nest_rig.replay(plant)

    assert ("child", "output.0") in results.ports
    assert ("child", "output.1") not in results.ports
    assert results.unmatched_expected == []


def test_part_of_a_tuple_that_is_gone_altogether_is_missing(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _module, original, x: (original(x)[0],))

    assert nest_rig.replay(plant).unmatched_expected == ["child:output.1"]


def test_values_keep_the_dtype_that_the_running_code_gave_them(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    seen: list[torch.dtype] = []

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.weight = nn.Parameter(tensor(8, 8))

        def forward(self, x: Tensor) -> Any:
            scores = F.linear(x.to(self.weight.dtype), self.weight).float().softmax(-1)
            seen.append(self.inner(scores).dtype)
            return scores

    rig = make_rig(Router(), lambda model: model(NUMBERS))
    rig.replay()

    assert seen[-1] is torch.float32  # bfloat16 weights, float32 on purpose


def test_value_changed_in_place_between_two_children_is_compared(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    class InPlace(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.two = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            hidden = self.one(x.to(self.one.weight.dtype))
            hidden.mul_(self.factor)
            return self.two(hidden)

    x = tensor(1, 64, 8)
    rig = make_rig(InPlace(), lambda model: model(x))

    def plant(model: Any) -> None:
        model.factor = 2.1

    assert rig.failed(do_nothing) == set()
    assert rig.failed(plant) == {"(model)"}


# KVSharingDict of transformers 5.23 is a UserDict; it was a dict before.
@pytest.mark.parametrize("container", [dict, UserDict])
def test_dictionary_to_which_a_layer_adds_what_a_later_one_reads_stays_the_same_one(
    make_rig: MakeRig, tensor: Callable[..., Tensor], container: Callable[[], Any]
) -> None:
    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, shared: Any) -> Any:
            if self.name in shared:
                return self.linear(x) + shared[self.name][0]
            shared[self.name] = (self.linear(x),)
            return x + self.linear(x)

    class Layers(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, ("wide", "narrow", "wide", "narrow")))

        def forward(self, x: Tensor) -> Any:
            x, shared = x.to(next(self.parameters()).dtype), container()
            for layer in self.layers:
                x = layer(x, shared)
                if layer.name == "narrow":
                    shared["narrow"] = (shared["narrow"][0] * self.factor,)
            return x

    x = tensor(1, 64, 8)
    rig = make_rig(Layers(), lambda model: model(x))

    def plant(model: Any) -> None:
        model.factor = 1.05

    assert rig.failed(do_nothing) == set()
    assert rig.failed(plant) == {"(model)"}


def test_argument_that_only_the_candidate_changes_is_an_error_of_the_changer(
    make_rig: MakeRig, tensor: Callable[..., Tensor]
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            hidden = x.to(self.inner.weight.dtype) * 2
            return hidden + self.inner(hidden)

    def spoil(_module: Any, original: Any, hidden: Tensor) -> Any:
        output = original(hidden)
        hidden.add_(1.0)
        return output

    x = tensor(1, 64, 8)
    rig = make_rig(Outer(), lambda model: model(x))

    assert rig.failed(replace_forward("inner", spoil)) == {"inner"}


def test_result_of_another_shape_is_an_error(nest_rig: Rig) -> None:
    plant = replace_forward("child", lambda _m, original, x: tuple(t[:, :4] for t in original(x)))

    assert "child" in nest_rig.failed(plant)
