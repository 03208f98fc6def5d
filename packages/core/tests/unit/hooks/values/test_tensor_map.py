import gc
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.hooks.values.tensor_map import TensorMap


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
