"""The device of a trusted run."""

import pytest
import torch
from torch import Tensor

from assay.devices.cpu import CpuDevice
from assay.devices.sim import Arithmetic, SimDevice, trusted_device

LARGE, SMALL = 20_000_000, 19_999_999


@pytest.fixture
def processor_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Results of the replaced products so far."""
    results = []
    multiply = Arithmetic.multiply

    def keep(arithmetic: Arithmetic, left: Tensor, right: Tensor) -> Tensor:
        results.append(multiply(arithmetic, left, right))
        return results[-1]

    monkeypatch.setattr(Arithmetic, "multiply", keep)
    return results


@pytest.mark.usefixtures("processor_without_instructions")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_without_instructions_are_rounded_once_from_float32(
    dtype: str, products: list[Tensor]
) -> None:
    generator = torch.Generator().manual_seed(0)
    left, weight = (torch.randn(40, 70, generator=generator) for _ in range(2))
    left, weight = left.to(getattr(torch, dtype)), weight.to(getattr(torch, dtype))
    device = trusted_device(CpuDevice(), dtype, LARGE)

    with device.execution():
        product = torch.nn.functional.linear(left, weight)

    assert len(products) == 1
    assert torch.equal(product, (left.float() @ weight.float().T).to(product.dtype))


@pytest.mark.usefixtures("processor_without_instructions")
def test_products_of_gradients_are_replaced_too(products: list[Tensor]) -> None:
    weight = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    device = trusted_device(CpuDevice(), "bfloat16", LARGE)

    with device.execution():
        (torch.ones(2, 8, dtype=torch.bfloat16) @ weight).sum().backward()

    assert [one.shape for one in products] == [(2, 8), (8, 8)]


@pytest.mark.usefixtures("processor_without_instructions")
@pytest.mark.parametrize(
    ("device", "dtype", "num_parameters"),
    [
        (CpuDevice(), "float32", LARGE),
        (CpuDevice(), "float64", LARGE),
        (CpuDevice(), "bfloat16", SMALL),
        (SimDevice(), "bfloat16", LARGE),
    ],
)
def test_other_runs_keep_their_device(device: CpuDevice, dtype: str, num_parameters: int) -> None:
    assert trusted_device(device, dtype, num_parameters) is device


@pytest.mark.parametrize("capability", ["AVX512", "DEFAULT", "SVE256"])
def test_other_processors_keep_their_device(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    device = CpuDevice()

    assert trusted_device(device, "bfloat16", LARGE) is device
