"""Tests that an adapter implements the device protocol. Each check returns one line per violation.

Run as `pytest --pyargs assay.devices.conformance --assay-device npu/bfloat16`.
"""

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from assay.devices.base import Device
from assay.devices.detection import require_run
from assay.devices.registry import open_run
from assay.devices.run_string import RUN_DTYPES, parse_device, parse_run
from assay.dtypes import FORMATS
from assay.errors import AssayError

# Products and sums of small integers are exact in every format and order, also with e4m3 operands.
_LEFT = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
_RIGHT = ((1.0, 0.0), (2.0, 1.0), (0.0, 4.0))
_PRODUCT = [[5.0, 14.0], [14.0, 29.0]]

_ALLOCATED_BYTES = 4 << 20


def _names(device: Device) -> list[str]:
    parse_device(device.name)
    torch.device(device.torch_device)
    problems = [
        f"{attribute}() is empty"
        for attribute in ("product", "architecture")
        if not getattr(device, attribute)()
    ]
    if device.count() < 1:
        problems.append(f"count() is {device.count()}, but the device was opened")
    versions = device.versions()
    if versions.get("torch") != torch.__version__:
        problems.append(f"versions() has no torch {torch.__version__}: {dict(versions)}")
    return problems


def _vendor(device: Device) -> list[str]:
    problems = [
        f"vendor.{field} is empty"
        for field in ("name", "title", "distributed_backend", "compile_backend", "runner_labels")
        if not getattr(device.vendor, field)
    ]
    detected = {found.vendor.name for found in device.detect() if found.present}
    if device.vendor.name not in detected:
        problems.append(f"detect() finds {sorted(detected)}, but this is {device.vendor.name}")
    return problems


def _dtypes(device: Device) -> list[str]:
    """Require a correct product in every dtype of `supported_dtypes`."""
    problems = []
    dtypes = device.supported_dtypes()
    if not dtypes:
        problems.append("supported_dtypes() is empty")
    for name in dtypes:
        if name not in RUN_DTYPES:
            problems.append(f"supported_dtypes() names {name!r}, which no run can have")
            continue
        problem = _product_problem(device, name)
        if problem:
            problems.append(f"supported_dtypes() names {name}, but {problem}")
    return problems


def _product_problem(device: Device, name: str) -> str:
    dtype: torch.dtype = getattr(torch, name)
    try:
        with torch.inference_mode(), device.execution():
            left = torch.tensor(_LEFT, dtype=dtype).to(device.torch_device)
            right = torch.tensor(_RIGHT, dtype=dtype).to(device.torch_device)
            product = left @ right
            device.synchronize()
    except Exception as error:  # noqa: BLE001 - any exception is a problem of the device
        return f"a product in it raises {type(error).__name__}: {error}"
    if product.dtype is not dtype:
        return f"a product in it is {product.dtype}"
    if product.to("cpu", torch.float64).tolist() != _PRODUCT:
        return f"a product in it is {product.tolist()}, not {_PRODUCT}"
    return ""


def _precision(device: Device) -> list[str]:
    """Require that operands are rounded to the dtype or to a format with fewer bits."""
    problems = []
    for dtype in device.supported_dtypes():
        precision = device.effective_precision(dtype)
        # A vendor's own format may be absent from the table.
        bits = FORMATS[precision].significand_bits if precision in FORMATS else 0
        if not precision or bits > FORMATS[dtype].significand_bits:
            problems.append(f"effective_precision({dtype!r}) is {precision!r}")
    return problems


def _seed(device: Device) -> list[str]:
    dtype: torch.dtype = getattr(torch, device.supported_dtypes()[0])
    draws = []
    for seed in (7, 7, 8):
        device.seed(seed)
        on_device = torch.rand(4, dtype=dtype, device=device.torch_device).tolist()
        host = (random.random(), float(np.random.rand()))  # noqa: NPY002, S311
        draws.append((on_device, host))
    problems = [] if draws[0] == draws[1] else ["seed() twice with one number gives two sequences"]
    # Each generator separately, so that one that ignores its seed is found.
    for generator, first, other in zip(("torch", "host"), draws[1], draws[2], strict=True):
        if first == other:
            problems.append(f"seed() does not change what the {generator} generator draws")
    return problems


def _determinism(device: Device) -> list[str]:
    before = torch.are_deterministic_algorithms_enabled()
    with device.deterministic():
        inside = torch.are_deterministic_algorithms_enabled()
    after = torch.are_deterministic_algorithms_enabled()
    problems = [] if inside else ["deterministic() does not ask torch for deterministic kernels"]
    return problems + (
        [] if after == before else ["deterministic() does not restore torch's setting"]
    )


def _memory(device: Device) -> list[str]:
    problems = []
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    block = torch.ones(_ALLOCATED_BYTES, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    after = device.peak_memory_bytes()
    del block
    free = device.free_memory_bytes()
    is_measured = device.vendor.measures_memory
    if before < 0 or after < max(before, _ALLOCATED_BYTES if is_measured else 0):
        problems.append(f"peak_memory_bytes() is {before} and then {after}")
    if free < (1 if is_measured else 0):
        problems.append(f"free_memory_bytes() is {free}")
    return problems


CHECKS: Mapping[str, Callable[[Device], list[str]]] = {
    "names": _names,
    "vendor": _vendor,
    "dtypes": _dtypes,
    "precision": _precision,
    "seed": _seed,
    "determinism": _determinism,
    "memory": _memory,
}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    """Open the device under test, first in another process because a driver may hang or crash."""
    run = parse_run(request.config.getoption("assay_device") or "cpu/float32")
    try:
        require_run(run)
        return open_run(run)
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.mark.parametrize("point", CHECKS)
def test_device_keeps_the_protocol(device: Device, point: str) -> None:
    """Expect no violation of this point."""
    assert CHECKS[point](device) == []
