import pytest
import torch

from assay.recording.operation_names import is_pointwise, operation_name

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
