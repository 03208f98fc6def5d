"""The host's processor, and what adapters over torch share."""

import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.devices import cpu
from assay.devices.cpu import CpuDevice
from assay.devices.torch_backend import (
    deterministic_algorithms,
    float32_operand_format,
    seed_generators,
)
from assay.errors import UsageError
from packages.core.tests.unit.devices.protocol_checks import check_device_protocol


def test_cpu_implements_the_protocol() -> None:
    check_device_protocol(CpuDevice())


def test_cpu_has_no_variants() -> None:
    with pytest.raises(UsageError, match="unknown device 'cpu:1'; there is: cpu"):
        CpuDevice("1")


def test_float32_products_are_float32_by_default() -> None:
    assert CpuDevice().effective_precision("float32") == "float32"


class NewerSettings:
    """What `torch.backends.*.matmul` is since torch 2.9."""

    def __init__(self, fp32_precision: str) -> None:
        self.fp32_precision = fp32_precision


@pytest.mark.parametrize(
    ("setting", "operands"),
    [("none", "float32"), ("ieee", "float32"), ("tf32", "tf32"), ("bf16", "bfloat16")],
)
def test_precision_of_float32_products_is_read_from_torch(setting: str, operands: str) -> None:
    assert float32_operand_format(NewerSettings(setting)) == operands


@pytest.mark.parametrize(
    ("setting", "operands"), [("highest", "float32"), ("high", "tf32"), ("medium", "bfloat16")]
)
def test_precision_of_float32_products_is_read_from_older_torch(
    monkeypatch: pytest.MonkeyPatch, setting: str, operands: str
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    assert float32_operand_format(None) == operands


def test_lower_precision_of_float32_products_leaves_other_dtypes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "matmul", NewerSettings("bf16"), raising=False)
    assert CpuDevice().effective_precision("float32") == "bfloat16"
    assert CpuDevice().effective_precision("float64") == "float64"


def test_seed_repeats_all_three_generators() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002, S311

    seed_generators(3)
    first = draw()
    assert draw() != first
    seed_generators(3)
    assert draw() == first


def test_seed_may_be_larger_than_numpy_takes() -> None:
    seed_generators(2**40 + 5)
    large = float(np.random.rand())  # noqa: NPY002 - the generator that is seeded
    seed_generators(5)
    assert float(np.random.rand()) == large  # noqa: NPY002 - as above


def test_determinism_is_restored_after_an_exception() -> None:
    def settings() -> tuple[bool, bool, bool]:
        memory: Any = torch.utils.deterministic
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            memory.fill_uninitialized_memory,
        )

    inside = []

    def look_and_fail() -> None:
        inside.append(settings())
        raise RuntimeError

    before = settings()
    with pytest.raises(RuntimeError), deterministic_algorithms():
        look_and_fail()
    assert inside == [(True, True, False)]
    assert settings() == before


def test_memory_peak_falls_with_a_reset_and_grows_with_a_block() -> None:
    device = CpuDevice()
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    # Not from torch, which may take memory that earlier tests have freed.
    with mmap.mmap(-1, size := 64 << 20) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        with_block = device.peak_memory_bytes()
    device.reset_peak_memory()
    after = device.peak_memory_bytes()

    assert with_block - before > size // 2
    if after == with_block:
        pytest.skip("this system cannot reset the resident peak: no /proc/self/clear_refs")
    assert with_block - after > size // 2


@pytest.mark.parametrize(("used", "available"), [(400_000, 600_000), (1_000_000, 1)])
def test_free_memory_is_bounded_by_the_control_group(
    used: int, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    assert cpu.available_bytes() == available

    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 50000\nactive_file 50000\n")
    assert cpu.available_bytes() == 1_050_000 - used


def test_control_group_without_a_limit_bounds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path / "absent")
    free = cpu.available_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    assert cpu.available_bytes() == pytest.approx(free, rel=0.2)


def test_memory_is_known_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_PROC", tmp_path)
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    cpu.reset_peak_resident_bytes()
    assert cpu.peak_resident_bytes() > 1 << 20
    assert cpu.available_bytes() > 1 << 20


def test_peak_never_falls_though_the_kernel_s_count_does(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([500, 499])
    monkeypatch.setattr(cpu, "_kibibyte_field", lambda *_: next(readings))
    monkeypatch.setattr(cpu, "_highest", [0])

    assert [cpu.peak_resident_bytes() for _ in range(2)] == [500, 500]
