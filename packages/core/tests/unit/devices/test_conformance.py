"""The conformance check reports every violation of the protocol."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from assay.devices.base import Detection, DeviceVendor
from assay.devices.cpu import CpuDevice
from packages.core.tests.unit.devices.protocol_checks import ConformanceError, check_device_protocol


def problems_of(device: Any) -> list[str]:
    with pytest.raises(ConformanceError) as raised:
        check_device_protocol(device)
    first, *problems = str(raised.value).split("\n")
    assert first == f"{type(device).__name__} does not keep the device protocol:"
    return [problem.strip() for problem in problems]


@contextmanager
def products_changed_by(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Inside, `left @ right` is `change(left, left @ right)`."""
    original = torch.Tensor.__matmul__

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return change(left, original(left, right))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", multiply)
        yield


class LiesAboutFormats(CpuDevice):
    """Declares a dtype that it cannot multiply, and one that no run can have."""

    def supported_dtypes(self) -> tuple[str, ...]:
        return ("float16", "float32", "float8_e4m3fn")

    @contextmanager
    def execution(self) -> Iterator[None]:
        def refuse(left: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
            if left.dtype is torch.float16:
                raise RuntimeError("no kernel for half")
            return product

        with products_changed_by(refuse):
            yield


def test_dtype_without_a_product_is_reported() -> None:
    assert problems_of(LiesAboutFormats())[:2] == [
        (
            "supported_dtypes() names float16, but "
            "a product in it raises RuntimeError: no kernel for half"
        ),
        "supported_dtypes() names 'float8_e4m3fn', which no run can have",
    ]


class MultipliesWrongly(CpuDevice):
    """Changes its products."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._change = change

    def supported_dtypes(self) -> tuple[str, ...]:
        return ("bfloat16",)

    @contextmanager
    def execution(self) -> Iterator[None]:
        with products_changed_by(lambda _, product: self._change(product)):
            yield


def test_product_in_another_dtype_is_reported() -> None:
    assert problems_of(MultipliesWrongly(lambda product: product.float())) == [
        "supported_dtypes() names bfloat16, but a product in it is torch.float32"
    ]


def test_wrong_product_is_reported_with_the_right_one() -> None:
    assert problems_of(MultipliesWrongly(lambda product: product + 1)) == [
        (
            "supported_dtypes() names bfloat16, but a product in it is "
            "[[6.0, 15.0], [15.0, 30.0]], not [[5.0, 14.0], [14.0, 29.0]]"
        )
    ]


class LiesAboutItself(CpuDevice):
    """Has another vendor than it detects, empty names, and more precision than the dtype."""

    vendor = DeviceVendor("other", "Other", "gloo", "eager", ())

    def product(self) -> str:
        return ""

    def count(self) -> int:
        return 0

    def versions(self) -> dict[str, str]:
        return {"torch": "1.0"}

    def effective_precision(self, dtype: str) -> str:
        return "float32" if dtype == "float16" else dtype

    def peak_memory_bytes(self) -> int:
        return -1

    def free_memory_bytes(self) -> int:
        return 0


def test_every_wrong_answer_is_named_at_once() -> None:
    assert problems_of(LiesAboutItself()) == [
        "product() is empty",
        "count() is 0, but the device was opened",
        f"versions() has no torch {torch.__version__}: {{'torch': '1.0'}}",
        "vendor.runner_labels is empty",
        "detect() finds ['cpu'], but this is other",
        "effective_precision('float16') is 'float32'",
        "peak_memory_bytes() is -1 and then -1",
        "free_memory_bytes() is 0",
    ]


class LeavesTracks(CpuDevice):
    """Changes settings that it does not restore, and ignores seeds."""

    def seed(self, seed: int) -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        torch.set_deterministic_debug_mode("warn")
        yield


def test_seed_without_effect_and_a_setting_left_behind_are_named() -> None:
    try:
        assert problems_of(LeavesTracks()) == [
            "seed() does not change what the torch generator draws",
            "seed() does not change what the host generator draws",
            "deterministic() does not restore torch's setting",
        ]
    finally:
        torch.set_deterministic_debug_mode("default")


class MeasuresNothing(CpuDevice):
    """Tells one number whatever is allocated, and asks for no deterministic kernels."""

    def peak_memory_bytes(self) -> int:
        return 1 << 20

    def deterministic(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_constant_peak_and_kernels_that_nobody_asked_for_are_named() -> None:
    assert problems_of(MeasuresNothing()) == [
        "deterministic() does not ask torch for deterministic kernels",
        f"peak_memory_bytes() is {1 << 20} and then {1 << 20}",
    ]


class NeverTheSame(CpuDevice):
    def seed(self, seed: int) -> None:
        torch.seed()


def test_seed_that_does_not_repeat_is_named() -> None:
    assert "seed() twice with one number gives two sequences" in problems_of(NeverTheSame())


class Raises(CpuDevice):
    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        raise OSError("bus error")


def test_member_that_raises_is_reported() -> None:
    assert problems_of(Raises()) == ["vendor: OSError: bus error"]
