import gc
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from assay.hooks.tensors import (
    Boundary,
    TensorMap,
    cast_within_range,
    constants,
    copy_of,
    iterate_leaves,
    iterate_tensors,
    laid_out_as,
    map_tensors,
    replace_tensors,
)

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


def test_a_dictionary_takes_what_replaces_its_tensors_and_a_model_output_does_not() -> None:
    shared = {"keys": (ONE, TWO)}
    output = BaseModelOutputWithPast(last_hidden_state=ONE)

    assert replace_tensors({"shared": shared}, "input", doubled)["shared"] is shared
    assert [float(one) for one in shared["keys"]] == [2.0, 4.0]
    assert replace_tensors(output, "output", doubled) is not output
    assert float(output["last_hidden_state"]) == 1.0


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


def value_of(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([number], dtype=dtype)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_largest_number_of_a_wider_dtype_stays_finite(dtype: torch.dtype, sign: float) -> None:
    wide = torch.tensor([sign * torch.finfo(torch.float64).max, 1.5], dtype=torch.float64)

    assert cast_within_range(wide, dtype).tolist() == [sign * torch.finfo(dtype).max, 1.5]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_stays_infinite_next_to_clamped_values(value: float) -> None:
    wide = torch.tensor([value, 1e300, -2.0], dtype=torch.float64)

    assert cast_within_range(wide, torch.float16).tolist() == [value, 65504.0, -2.0]


def test_nan_stays_nan() -> None:
    assert math.isnan(float(cast_within_range(value_of(math.nan), torch.bfloat16)))


def test_largest_float32_is_not_rounded_to_infinity_in_bfloat16() -> None:
    # 3.4028e38 is over the largest bfloat16, 3.3895e38, and would round up.
    largest = value_of(torch.finfo(torch.float32).max)

    assert torch.isinf(largest.to(torch.bfloat16)).all()
    assert float(cast_within_range(largest, torch.bfloat16)) == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_cast_without_a_change(dtype: torch.dtype) -> None:
    assert cast_within_range(torch.tensor([0, 1], dtype=dtype), torch.float16).tolist() == [0, 1]
    assert cast_within_range(value_of(1.0), dtype).dtype is dtype


def test_empty_tensor_is_cast() -> None:
    assert cast_within_range(torch.zeros(0, 3), torch.float16).dtype is torch.float16


def test_value_in_its_own_dtype_is_the_same_object() -> None:
    value = value_of(1e30)

    assert cast_within_range(value, torch.float32) is value


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
)
def test_yardstick_stores_a_dtype_that_resolves_the_candidate_s_rounding(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    boundary = Boundary.exact_inputs_for(dtype)

    assert (boundary.stored, boundary.rounded) == (stored, dtype)


def test_stored_value_is_not_rounded_and_the_injected_one_is() -> None:
    boundary = Boundary.exact_inputs_for(torch.bfloat16)
    value = value_of(1.0 + 2.0**-10, torch.float64)

    stored = boundary.store(value)
    injected = boundary.injected(stored, torch.float64)

    assert float(stored) == 1.0 + 2.0**-10
    assert (float(injected), injected.dtype) == (1.0, torch.float64)


def test_injected_value_is_the_same_in_every_dtype_that_can_hold_it() -> None:
    # What the yardstick computes with in float64 must be what the candidate gets in bfloat16.
    boundary = Boundary.exact_inputs_for(torch.bfloat16)
    stored = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    in_bfloat16 = boundary.injected(stored, torch.bfloat16)

    assert torch.equal(boundary.injected(stored, torch.float64), in_bfloat16.double())
    assert torch.equal(boundary.injected(stored, torch.float32), in_bfloat16.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stored_value_survives_a_write_to_the_original(dtype: torch.dtype) -> None:
    boundary = Boundary.exact_inputs_for(dtype)
    value = value_of(1.5, boundary.stored or dtype)

    stored = boundary.store(value)
    value.fill_(7.0)

    assert float(stored) == 1.5


def test_boundary_without_dtypes_changes_nothing() -> None:
    value = value_of(0.1, torch.float64)

    assert Boundary().store(value) is value
    assert Boundary().injected(value, torch.float64) is value


def test_integers_pass_every_boundary() -> None:
    boundary = Boundary.exact_inputs_for(torch.bfloat16)
    ids = torch.tensor([257, 100_001])

    assert boundary.store(ids) is ids
    assert boundary.injected(ids, torch.int64).tolist() == [257, 100_001]


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def same_place(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    places = [(one.stride(), one.storage_offset()) for one in (actual, expected)]
    return places[0] == places[1]


def test_a_transposed_tensor_stays_transposed() -> None:
    like = torch.zeros(4, 3, 2).transpose(0, 1)
    laid = laid_out_as(values(3, 4, 2), like)
    assert torch.equal(laid, values(3, 4, 2))
    assert same_place(laid, like)


def test_a_view_of_a_larger_tensor_keeps_its_gaps_and_offset() -> None:
    like = torch.zeros(2, 5, 12)[..., 4:8]
    laid = laid_out_as(values(2, 5, 4), like)
    assert torch.equal(laid, values(2, 5, 4))
    assert (laid.stride(), laid.storage_offset()) == ((60, 12, 1), 4)
    # A kernel that ignores strides reads what lies between.
    read = torch.empty(0).set_(laid.untyped_storage(), 4, laid.shape, (20, 4, 1))
    assert not torch.equal(read, laid)


def test_a_large_offset_keeps_its_alignment() -> None:
    like = torch.zeros(5000)[4001:4003]
    assert laid_out_as(values(2), like).storage_offset() == 1024 + 4001 % 64


def test_an_expanded_tensor_stays_expanded_if_its_rows_are_equal() -> None:
    like = torch.zeros(1, 3).expand(4, 3)
    alike, different = values(3).repeat(4, 1), values(4, 3)
    assert same_place(laid_out_as(alike, like), like)
    assert torch.equal(laid_out_as(alike, like), alike)
    assert laid_out_as(different, like) is different


def test_a_value_with_the_layout_or_with_overlaps_is_returned_itself() -> None:
    value = values(4, 2)
    assert laid_out_as(value, torch.zeros(4, 2)) is value
    windows = torch.zeros(5).unfold(0, 2, 1)
    assert laid_out_as(value, windows) is value
    empty = torch.zeros(0, 2)
    assert laid_out_as(empty, torch.zeros(2, 0).t()) is empty


def test_a_copy_has_the_layout_of_the_original_and_may_change() -> None:
    original = torch.zeros(2, 6)[:, 1:3]
    copy = copy_of(original)
    assert same_place(copy, original)
    copy += 1
    assert not original.any()


def test_only_the_same_object_is_recognized() -> None:
    known: TensorMap[str] = TensorMap()
    tensor = torch.ones(2)
    known.put(tensor, "x")

    assert known.get(tensor) == "x"
    assert known.get(torch.ones(2)) is None
    assert known.get(tensor.view(2)) is None


def test_tensor_changed_in_place_is_another_value() -> None:
    known: TensorMap[str] = TensorMap()
    tensor = torch.ones(2)
    known.put(tensor, "x")
    tensor.mul_(2)

    assert known.get(tensor) is None
    known.put(tensor, "y")
    assert known.get(tensor) == "y"


def test_forgotten_and_cleared_tensors_are_unknown() -> None:
    known: TensorMap[str] = TensorMap()
    one, two = torch.ones(1), torch.ones(1)
    known.put(one, "1")
    known.put(two, "2")

    known.forget(one)
    known.forget(one)
    assert (known.get(one), known.get(two)) == (None, "2")
    known.clear()
    assert known.get(two) is None


def test_entry_ends_with_its_tensor_and_its_id_is_not_reused() -> None:
    known: TensorMap[str] = TensorMap()
    for _ in range(100):
        known.put(torch.ones(1), "old")
    gc.collect()

    assert all(known.get(torch.ones(1)) is None for _ in range(100))
    assert len(known._entries) == 0


def test_inference_tensors_are_known_until_they_change() -> None:
    known: TensorMap[str] = TensorMap()
    with torch.inference_mode():
        tensor = torch.ones(3)
        known.put(tensor, "x")

        assert known.get(tensor) == "x"
        tensor[1] *= 3
        assert known.get(tensor) is None


def test_a_nan_is_no_change_of_an_inference_tensor() -> None:
    known: TensorMap[str] = TensorMap()
    with torch.inference_mode():
        tensor = torch.tensor([1.0, math.nan])
        known.put(tensor, "x")

        assert known.get(tensor) == "x"
        tensor[0] = math.nan
        assert known.get(tensor) is None


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.float8_e5m2,
        torch.bool,
    ],
)
def test_a_change_of_one_byte_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    known: TensorMap[str] = TensorMap()
    with torch.inference_mode():
        tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
        known.put(tensor, "x")

        tensor.view(torch.uint8)[-1] = 1
        assert known.get(tensor) is None


class Subclass(Tensor):
    """Such as DTensor, which cannot be copied while torch's dispatch is disabled."""

    def clone(self, *_: object, **_kwargs: object) -> Tensor:
        raise AssertionError("is copied")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about kinds that it may drop
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).as_subclass(Subclass),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.zeros(2, dtype=torch.complex32),
        lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.empty(0),
    ],
)
def test_every_kind_of_inference_tensor_stays_known(make: Callable[[], Tensor]) -> None:
    known: TensorMap[str] = TensorMap()
    with torch.inference_mode():
        tensor = make()
        known.put(tensor, "x")

        assert known.get(tensor) == "x"
