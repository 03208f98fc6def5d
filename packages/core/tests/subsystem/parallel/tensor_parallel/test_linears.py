"""Divided linears against the same linear on one process, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from assay.devices.base import Device
from assay.errors import UsageError
from assay.parallel import tensor_parallel
from assay.parallel.rank_boundaries import (
    Division,
    divide_by_heads,
    divide_evenly,
    fuse,
    share_heads,
)
from assay.parallel.tensor_parallel import (
    ShardParameters,
    divide_columns,
    divide_columns_and_gather,
    divide_rows,
    sum_over_ranks,
)
from packages.core.tests.subsystem.parallel.judging import differing, plain

# Neither divides by 3: some ranks have less.
IN_FEATURES, OUT_FEATURES = 25, 32
NUM_ROWS = 10

Results = dict[str, Tensor]
Divide = Callable[[nn.Linear, ShardParameters], object]


@dataclass(frozen=True)
class Variant:
    """One way to divide a linear, and what this rank then has; None is all."""

    divide: Divide
    inputs: Division | None = None
    outputs: Division | None = None


def variants(num_ranks: int) -> dict[str, Variant]:
    # 12 query heads and 2 + 2 others of 2 features: of 3 ranks the middle one needs both.
    shares = share_heads(12, 2, num_ranks)
    query = divide_by_heads(12, 2, [share.query_heads for share in shares])
    kv = divide_by_heads(2, 2, [share.kv_heads for share in shares])
    half = divide_evenly(OUT_FEATURES // 2, num_ranks)
    rows = divide_evenly(IN_FEATURES, num_ranks)
    return {
        "column": by_columns(divide_evenly(OUT_FEATURES, num_ranks)),
        "fused qkv": by_columns(fuse(query, kv, kv)),
        "fused gate and up": by_columns(fuse(half, half)),
        "replicated kv": by_columns(divide_by_heads(1, OUT_FEATURES, [[0]] * num_ranks)),
        "column, gathered": Variant(lambda m, s: divide_columns_and_gather("linear", m, s)),
        "row": Variant(lambda m, s: divide_rows("linear", m, s), inputs=rows),
    }


def by_columns(division: Division) -> Variant:
    return Variant(lambda m, s: divide_columns("linear", m, division, s), outputs=division)


VARIANTS = [*variants(2)]


def make_linear(*, has_bias: bool) -> nn.Linear:
    linear = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=has_bias)
    for parameter in linear.parameters():
        with torch.no_grad():
            parameter.copy_(draw(*parameter.shape))
    return linear


def draw(*shape: int) -> Tensor:
    """The same everywhere, and what bfloat16 can hold: all sides get the same."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().float()


def run(
    linear: nn.Linear, values: Tensor, gradient: Tensor, computing: torch.dtype | None = None
) -> Results:
    """Two calls, whose gradients add up."""
    values = values.detach().requires_grad_()
    output = values
    for _ in range(2):
        with torch.autocast(values.device.type, computing, enabled=computing is not None):
            output = linear(values)
        output.backward(gradient.to(output.dtype))
    assert values.grad is not None
    results = {"output": plain(output), "input gradient": plain(values.grad)}
    for name, parameter in linear.named_parameters():
        assert parameter.grad is not None
        results[f"{name} gradient"] = plain(parameter.grad)
    return results


def cut(whole: Tensor, division: Division | None, rank: int) -> Tensor:
    return whole if division is None else whole[:, division.features_of(rank)]


def compare(
    mesh: DeviceMesh, device: Device, name: str, dtype: str, *, has_bias: bool,
    fault: str | None = None, divided_as: str | None = None,
) -> list[str]:  # fmt: skip
    """What differs between this rank's part of the divided linear and that of the whole one.

    dtype: "mixed" has float32 parameters and computes in bfloat16.
    fault: what is broken on purpose.
    divided_as: another variant by which the linear is divided.
    """
    holding = torch.float32 if dtype == "mixed" else getattr(torch, dtype)
    computing = torch.bfloat16 if dtype == "mixed" else None
    of, rank = variants(mesh.size())[name], mesh.get_local_rank()
    values, gradient = draw(NUM_ROWS, IN_FEATURES), draw(NUM_ROWS, OUT_FEATURES)

    def whole(dtype: torch.dtype, where: str, computing: torch.dtype | None = None) -> Results:
        linear = make_linear(has_bias=has_bias).to(where, dtype)
        results = run(linear, values.to(where, dtype), gradient.to(where, dtype), computing)
        results["output"] = cut(results["output"], of.outputs, rank)
        results["input gradient"] = cut(results["input gradient"], of.inputs, rank)
        return results

    linear = make_linear(has_bias=has_bias).to(device.torch_device, holding)
    by = variants(mesh.size())[divided_as] if divided_as else of
    by.divide(linear, ShardParameters(mesh["tp"]))
    if fault:
        break_layers(fault, linear)
    here = cut(gradient, of.outputs, rank)
    if of.outputs is not None:
        # Of features that several ranks hold, each gets a part of the gradient.
        copies = of.outputs.copies()
        here = here / torch.tensor([copies[i] for i in of.outputs.features_of(rank)])
    actual = run(
        linear,
        cut(values, of.inputs, rank).to(device.torch_device, holding),
        here.to(device.torch_device, holding),
        computing,
    )
    noise = whole(holding, device.torch_device, computing)
    return differing(actual, noise, whole(torch.float64, "cpu"))


@pytest.mark.world(tp=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_divided_linear_computes_what_the_whole_one_does(
    mesh: DeviceMesh, device: Device, name: str, dtype: str
) -> None:
    with_bias = compare(mesh, device, name, dtype, has_bias=True)
    without_bias = compare(mesh, device, name, dtype, has_bias=False)
    assert (with_bias, without_bias) == ([], [])


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_compute_what_one_does(mesh: DeviceMesh, device: Device, name: str) -> None:
    assert compare(mesh, device, name, "float32", has_bias=True) == []


def break_layers(fault: str, linear: nn.Linear) -> None:
    """Break one thing for the rest of this rank's life, which ends with the test."""
    faults: dict[str, tuple[str, object]] = {
        "gradients of inputs are not summed": ("sum_gradients", lambda whole, _: whole),
        "gradients of replicas are not summed": ("Partial", Replicate),
        "outputs are not summed": ("sum_over_ranks", lambda summand, _: summand),
        "every rank adds the bias": (
            "sum_over_ranks",
            lambda x, mesh: sum_over_ranks(x + linear.bias.detach().to(x.dtype) / 2, mesh),
        ),
    }
    setattr(tensor_parallel, *faults[fault])


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("column", "gradients of inputs are not summed", "input gradient"),
        ("replicated kv", "gradients of replicas are not summed", "weight gradient"),
        ("row", "outputs are not summed", "output"),
        ("row", "every rank adds the bias", "output"),
    ],
)
def test_broken_layer_is_found(
    mesh: DeviceMesh, device: Device, dtype: str, name: str, fault: str, found: str
) -> None:
    assert found in compare(mesh, device, name, dtype, has_bias=True, fault=fault)


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("name", ["fused qkv", "fused gate and up"])
def test_fused_weight_that_is_cut_as_one_is_found(
    mesh: DeviceMesh, device: Device, name: str
) -> None:
    found = compare(mesh, device, name, "bfloat16", has_bias=True, divided_as="column")
    assert {"output", "weight gradient", "bias gradient"} <= {*found}


@pytest.mark.world(tp=2)
def test_only_plain_linears_are_divided_and_only_once(mesh: DeviceMesh) -> None:
    linear = nn.Linear(4, 4)
    shards = ShardParameters(mesh["tp"])
    divide_rows("proj", linear, shards)
    with pytest.raises(UsageError) as caught:
        divide_columns("proj", linear, divide_evenly(4, 2), shards)
    assert str(caught.value) == (
        "proj is a RowParallelLinear; only a plain Linear can be divided over tensor-parallel ranks"
    )
