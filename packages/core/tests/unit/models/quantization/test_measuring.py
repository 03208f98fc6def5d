"""Errors of groups: worked out by hand, and the same however the rows are divided."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from assay.models.quantization import quantized_weight
from assay.models.quantization.measuring import measure_groups
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight


def two_bit_weight() -> QuantizedWeight:
    """One group, scale 1, zero point 1: the values -1, 0, 1, 2."""
    return QuantizedWeight(
        codes=torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8),
        grid=Grid.of_unsigned(2),
        groups=Groups((1, 4), (1, 4)),
        scales=torch.ones(1),
        scale_precision=0.0,
        stored_zeros=torch.ones(1),
    )


def test_error_of_one_group() -> None:
    errors = measure_groups(two_bit_weight(), torch.tensor([[-1.0, 0.0, 1.0, 4.0]]))
    # d - w = (0, 0, 0, -2), ||w|| = sqrt(18)
    assert errors.error.item() == pytest.approx((4 / 18) ** 0.5)
    assert errors.size.item() == pytest.approx(18**0.5)
    assert errors.correlation.item() == pytest.approx(10 / (18 * 6) ** 0.5)


def test_best_error_where_the_grid_fits_exactly() -> None:
    # The range -1 ... 2 in 3 steps is a scale of 1 and a zero point of 1.
    errors = measure_groups(
        replace(two_bit_weight(), scales=torch.tensor([5.0])), torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    )
    assert errors.best.item() == 0.0
    assert errors.error.item() == pytest.approx((4**2 * 6 / 6) ** 0.5)


@pytest.mark.parametrize(("error", "best"), [("error", 0.0), ("best", 0.0)])
def test_zeros_on_both_sides_are_no_error(error: str, best: float) -> None:
    weight = replace(two_bit_weight(), codes=torch.ones(1, 4, dtype=torch.uint8))
    assert getattr(measure_groups(weight, torch.zeros(1, 4)), error).item() == best


def test_values_where_zeros_are_expected_are_an_infinite_error() -> None:
    assert measure_groups(two_bit_weight(), torch.zeros(1, 4)).error.item() == float("inf")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_expected_values_that_are_not_finite(value: float) -> None:
    errors = measure_groups(two_bit_weight(), torch.tensor([[-1.0, 0.0, 1.0, value]]))
    assert not errors.error.item() <= 1e30


DIVISIONS = {
    "ragged columns": Groups((37, 100), (1, 32)),
    "ragged blocks": Groups((37, 100), (16, 64)),
    "whole": Groups((37, 100), (37, 100)),
    "flat": Groups((37, 101), (1, 64), is_flat=True),
    "order": Groups((37, 100), (1, 32), order=torch.arange(100) * 7 % 100),
}


def rounded(groups: Groups, reference: Tensor) -> QuantizedWeight:
    scale = 0.05
    rows = slice(0, groups.shape[0])
    matrix = groups.select(reference, rows).flatten(1)[:, : groups.shape[1]]
    codes = (matrix / scale).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
    scales = torch.full((groups.num_groups,), scale)
    return QuantizedWeight(codes, Grid.of_signed(-128, 127), groups, scales, scale_precision=0.0)


@pytest.mark.parametrize("name", DIVISIONS)
def test_chunks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = DIVISIONS[name]
    reference = torch.randn(groups.weight_shape, generator=torch.Generator().manual_seed(5))
    weight = rounded(groups, reference)
    whole = measure_groups(weight, reference)
    monkeypatch.setattr(quantized_weight, "_CHUNK_ELEMENTS", 700)
    assert len(list(groups.chunks())) > 1
    parts = measure_groups(weight, reference)
    for field in fields(whole):
        torch.testing.assert_close(getattr(parts, field.name), getattr(whole, field.name))


@pytest.mark.parametrize("name", DIVISIONS)
def test_each_element_counts_once(name: str) -> None:
    groups = DIVISIONS[name]
    reference = torch.randn(groups.weight_shape, generator=torch.Generator().manual_seed(5))
    weight = rounded(groups, reference)
    values = weight.dequantize()
    assert float((values - reference).abs().max()) <= 0.025 + 1e-6
    errors = measure_groups(weight, reference)
    total = (errors.error * errors.size).square().sum().item()
    assert total == pytest.approx((values - reference).square().sum().item(), rel=1e-5)
    assert errors.size.square().sum().item() == pytest.approx(
        reference.square().sum().item(), rel=1e-5
    )


def test_place_of_a_flat_block_that_spans_two_rows() -> None:
    rows, columns = Groups((4, 48), (1, 64), is_flat=True).place(1)
    assert (rows, columns) == (slice(1, 3), [*range(48)])


def test_place_of_a_group_in_another_order() -> None:
    groups = Groups((2, 4), (1, 2), order=torch.tensor([3, 0, 1, 2]))
    assert groups.place(0) == (slice(0, 1), [0, 3])
    assert groups.place(3) == (slice(1, 2), [1, 2])
