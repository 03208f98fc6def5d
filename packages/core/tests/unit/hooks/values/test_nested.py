from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from assay.hooks.values.nested import constants, iterate_leaves, iterate_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what torch returns is untyped, too
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


@dataclass
class Routing:
    weights: Tensor
    k: int


def doubled(_port: str, tensor: Tensor) -> Tensor:
    return 2 * tensor


def ports_of(value: Any) -> dict[str, float]:
    return {port: float(tensor) for port, tensor in iterate_tensors(value, "output")}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ONE, {"output": 1.0}),
        ((ONE, None, [TWO]), {"output.0": 1.0, "output.2.0": 2.0}),
        ({"a": ONE, "b": {"c": TWO}}, {"output.a": 1.0, "output.b.c": 2.0}),
        (OrderedDict(z=ONE, a=TWO), {"output.z": 1.0, "output.a": 2.0}),
        (Pair(ONE, TWO), {"output.0": 1.0, "output.1": 2.0}),
        (Routing(ONE, 2), {"output.weights": 1.0}),
        (BaseModelOutputWithPast(last_hidden_state=ONE), {"output.last_hidden_state": 1.0}),
        ((ONE, ONE), {"output.0": 1.0, "output.1": 1.0}),
        (None, {}),
        ((), {}),
        (3, {}),
    ],
    ids=["tensor", "tuple", "dict", "ordered", "named tuple", "dataclass", "model output",
         "one tensor twice", "none", "empty", "number"],
)  # fmt: skip
def test_ports_are_the_path_into_the_structure(value: Any, expected: dict[str, float]) -> None:
    assert ports_of(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        (ONE, None, [TWO]),
        {"a": ONE, "b": {"c": TWO}},
        OrderedDict(z=ONE, a=TWO),
        Pair(ONE, TWO),
        Routing(ONE, 2),
        BaseModelOutputWithPast(last_hidden_state=ONE, hidden_states=(TWO,)),
    ],
    ids=["tuple", "dict", "ordered", "named tuple", "dataclass", "model output"],
)
def test_replaced_tensors_keep_the_type_of_their_structure(value: Any) -> None:
    changed = map_tensors(value, "output", doubled)

    assert type(changed) is type(value)
    assert ports_of(changed) == {port: 2 * number for port, number in ports_of(value).items()}
    assert ports_of(value) != ports_of(changed)  # the original is as it was


def test_unchanged_structures_keep_their_identity() -> None:
    inner = [TWO]
    value = {"same": inner, "other": (ONE,)}

    changed = map_tensors(value, "x", lambda port, t: 2 * t if port == "x.other.0" else t)

    assert map_tensors(value, "x", lambda _port, tensor: tensor) is value
    assert changed["same"] is inner


def test_attributes_of_a_model_output_survive() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=ONE, past_key_values=None)

    changed = map_tensors(output, "output", doubled)

    assert float(changed.last_hidden_state) == 2.0
    assert float(changed["last_hidden_state"]) == 2.0
    assert changed.past_key_values is None


def test_cache_is_a_leaf_and_keeps_its_identity() -> None:
    cache = DynamicCache()

    assert [leaf for _, leaf in iterate_leaves((cache,), "input")] == [cache]
    assert map_tensors({"cache": cache, "x": ONE}, "input", doubled)["cache"] is cache


def test_constants_are_the_leaves_that_json_can_hold() -> None:
    arguments = {"use_cache": True, "scale": 0.5, "x": ONE, "mode": None, "shape": (2, torch.Size)}

    assert constants(arguments, "input") == {
        "input.use_cache": True, "input.scale": 0.5, "input.mode": None, "input.shape.0": 2,
    }  # fmt: skip
