"""The global norm where gradients are whole, divided, summands, and on several meshes."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from assay.devices.base import Device
from assay.parallel.pipeline import clip_gradients, gradient_norm
from assay.parallel.tensor_parallel import shard_tensor

# Norms 3, 4 and 12, which make 13 together; the last has an odd number of rows.
WHOLE = torch.tensor([0.0, 3.0, 0.0])
BY_ROWS = torch.tensor([[2.0, 2.0], [2.0, 2.0]])
UNEVEN = torch.tensor([[4.0], [8.0], [8.0]])


def gradients(mesh: DeviceMesh, device: Device) -> list[Tensor]:
    by_rows, uneven = BY_ROWS.to(device.torch_device), UNEVEN.to(device.torch_device)
    return [
        WHOLE.to(device.torch_device),
        distribute_tensor(by_rows, mesh, [Shard(0), Shard(1)]),
        shard_tensor(uneven, mesh["tp"], 0),
    ]


@pytest.mark.world(dp=2, tp=2)
def test_parts_count_once_and_whole_gradients_too(mesh: DeviceMesh, device: Device) -> None:
    assert float(gradient_norm(gradients(mesh, device))) == 13.0


@pytest.mark.world(dp=2, tp=2)
def test_part_counted_as_whole_changes_the_norm(mesh: DeviceMesh, device: Device) -> None:
    whole, by_rows, uneven = gradients(mesh, device)
    assert isinstance(by_rows, DTensor)
    # This rank's one element of 2 instead of four.
    expected = math.sqrt(9 + 4 + 144)
    assert float(gradient_norm([whole, by_rows.to_local(), uneven])) == pytest.approx(expected)


@pytest.mark.world(tp=2)
def test_summands_are_added_before_they_are_squared(mesh: DeviceMesh, device: Device) -> None:
    summand = torch.tensor([1.5, 2.0], device=device.torch_device)
    partial = DTensor.from_local(summand, mesh["tp"], [Partial()])
    assert float(gradient_norm([partial])) == 5.0  # of [3, 4]


@pytest.mark.world(tp=2)
def test_all_parts_are_scaled_alike_and_only_above_the_limit(
    mesh: DeviceMesh, device: Device
) -> None:
    whole = nn.Parameter(WHOLE.to(device.torch_device))
    divided = nn.Parameter(shard_tensor(UNEVEN.to(device.torch_device), mesh["tp"], 0))
    frozen = nn.Parameter(WHOLE.clone())
    whole.grad, divided.grad = whole.detach().clone(), divided.detach().clone()
    parameters = [whole, divided, frozen]
    norm = clip_gradients(parameters, 100.0)
    assert float(norm) == pytest.approx(math.sqrt(153))
    assert whole.grad.cpu().equal(WHOLE)
    clip_gradients(parameters, 1.0)
    assert isinstance(divided.grad, DTensor)
    scale = 1 / math.sqrt(153)
    torch.testing.assert_close(whole.grad.cpu(), WHOLE * scale)
    torch.testing.assert_close(divided.grad.full_tensor().cpu(), UNEVEN * scale)
    assert frozen.grad is None


@pytest.mark.world(tp=2)
def test_bfloat16_is_squared_in_float32_and_nan_stays(mesh: DeviceMesh, device: Device) -> None:
    ones = torch.ones(3000, dtype=torch.bfloat16, device=device.torch_device)
    norm = gradient_norm([shard_tensor(ones, mesh["tp"], 0)])
    # In bfloat16 the sum of 3000 ones ends at 256.
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(math.sqrt(3000))
    broken = torch.tensor([1.0, math.nan], device=device.torch_device)
    assert math.isnan(gradient_norm([shard_tensor(broken, mesh["tp"], 0), ones]))
    assert float(gradient_norm([])) == 0.0
