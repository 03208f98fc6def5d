from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor, nn

from assay.recording.modules import (
    Operation,
    OperationRecorder,
    PointwiseModules,
    is_pointwise,
    operation_name,
)
from packages.core.tests.unit.recording.gated import Gated, watching


def record(model: nn.Module, wanted: tuple[str, int, int], calls: int = 1) -> list[Operation]:
    with watching(model) as tracer, OperationRecorder(tracer, wanted) as recorder:
        for _ in range(calls):
            model(torch.ones(2, 4))
    operations: list[Operation] = recorder.operations
    return operations


def test_operations_of_one_module_are_recorded_without_those_of_its_children() -> None:
    model = Gated()

    assert [operation.name for operation in record(model, ("up", 0, 0))] == ["linear"]
    assert [operation.name for operation in record(model, ("", 0, 0))] == ["mul"]


def test_operations_of_children_that_the_other_side_never_calls_are_the_module_s_own() -> None:
    model = Gated()
    wanted, separate = ("", 0, 0), {"up", "norm"}
    with watching(model) as tracer, OperationRecorder(tracer, wanted, separate) as recorder:
        model(torch.ones(2, 4))

    assert [operation.name for operation in recorder.operations] == ["silu", "mul"]
    assert recorder.called == {"up", "act", "norm"}


def test_operations_of_another_call_are_not_recorded() -> None:
    assert len(record(Gated(), ("act", 1, 0), calls=3)) == 1
    assert record(Gated(), ("act", 3, 0), calls=3) == []
    assert record(Gated(), ("act", 0, 1)) == []


def test_recorded_values_precede_later_changes_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            return y.add_(1)

    operations = record(InPlace(), ("", 0, 0))

    assert [(item.name, float(item.outputs[0][0, 0])) for item in operations] == [
        ("mul", 2.0),
        ("add", 3.0),
    ]


def test_views_and_integers_are_not_recorded() -> None:
    class Moving(nn.Module):
        def forward(self, x: Tensor) -> Any:
            order = x.argsort(-1)
            return F.relu(x.view(-1)).reshape(x.shape).gather(-1, order)

    names = [operation.name for operation in record(Moving(), ("", 0, 0))]

    assert "relu" in names
    assert "view" not in names
    assert all(
        tensor.is_floating_point()
        for operation in record(Moving(), ("", 0, 0))
        for tensor in operation.outputs
    )


def test_modules_without_sums_in_their_own_code_are_pointwise() -> None:
    model = Gated()
    with watching(model) as tracer, PointwiseModules(tracer) as pointwise:
        model(torch.ones(2, 4))

    # The root's own code multiplies; sums are made by its children.
    assert pointwise.paths == {"", "act"}


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (aten.mm.default, "linear"),
        (aten.addmm.default, "linear"),
        (aten.linear.default, "linear"),
        (aten.bmm.default, "matmul"),
        (aten._softmax.default, "softmax"),
        (aten.mul.Tensor, "mul"),
        (aten.mul_.Tensor, "mul"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "scaled_dot_product_attention"),
    ],
    ids=str,
)
def test_one_computation_has_one_name(func: torch._ops.OpOverload, name: str) -> None:
    assert operation_name(func) == name


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.mul.Tensor, True),
        (aten.silu.default, True),
        (aten.gelu.default, True),
        (aten.view.default, True),
        (aten.cat.default, True),
        (aten._to_copy.default, True),
        (aten.mm.default, False),
        (aten.mean.dim, False),
        (aten._softmax.default, False),
        (aten.cumsum.default, False),
        (aten.sum.dim_IntList, False),
        (aten.convolution.default, False),
    ],
    ids=str,
)
def test_sums_are_not_pointwise(func: torch._ops.OpOverload, *, expected: bool) -> None:
    assert is_pointwise(func) is expected
