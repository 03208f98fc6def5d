"""Errors of groups: worked out by hand, and the same however the rows are divided."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from assay.models.quantization import quantized_weight
from assay.models.quantization.judging import (
    JudgedWeight,
    WeightFault,
    WeightResult,
    deviations_allowed,
)
from assay.models.quantization.measuring import measure_groups, pool_slopes
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


ROWS, COLUMNS = 1024, 256


@dataclass
class Sample:
    original: Tensor
    weight: QuantizedWeight

    def judge(self) -> WeightResult:
        errors = measure_groups(self.weight, self.original)
        limit = deviations_allowed(self.weight.groups.num_groups)
        return JudgedWeight("w", "f", self.weight, self.original, errors, limit, 2.0**-24).judge()

    def findings(self) -> tuple[WeightFault, ...]:
        return self.judge().findings

    def with_factor(self, group: int, factor: float) -> "Sample":
        scales = self.weight.scales.clone()
        scales[group] *= factor
        return Sample(self.original, replace(self.weight, scales=scales))


def quantize_by_gptq(
    size: int, bits: int = 4, rows: int = ROWS, columns: int = COLUMNS, *, uneven: bool = False
) -> Sample:
    """Quantize column by column; each error is made up for by the columns after it, as the inputs allow."""
    generator = torch.Generator().manual_seed(size)
    original = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 0.05
    if uneven:  # rows of other sizes, and values with 6 degrees of freedom
        draws = torch.randn(7, rows, columns, generator=generator, dtype=torch.float64)
        original *= (draws[:6].square().mean(0)).rsqrt() * (1 + 2 * draws[6, :, :1].abs())
    decay = (1 + torch.arange(columns)).double() ** -0.5
    mixing = torch.linalg.qr(torch.randn(columns, columns, generator=generator).double()).Q
    inputs = torch.randn(1024, columns, generator=generator).double() * decay @ mixing
    hessian = inputs.t() @ inputs
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    left, highest = original.clone(), 2**bits - 1
    codes, scales, zeros = torch.zeros_like(original), [], []
    for column in range(columns):
        if column % size == 0:
            group = left[:, column : column + size]
            low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
            scales.append(((high - low) / highest).half().double())
            zeros.append((-low / scales[-1]).round())
        code = (left[:, column] / scales[-1]).round().add(zeros[-1]).clamp(0, highest)
        codes[:, column] = code
        error = (left[:, column] - (code - zeros[-1]) * scales[-1]) / factor[column, column]
        left[:, column:] -= error[:, None] * factor[column, column:]
    weight = QuantizedWeight(
        codes.to(torch.uint8),
        Grid.of_unsigned(bits),
        Groups((rows, columns), (1, size)),
        torch.stack(scales, 1).float().flatten(),
        scale_precision=2.0**-11,
        stored_zeros=torch.stack(zeros, 1).float().flatten(),
    )
    return Sample(original.float(), weight)


@pytest.mark.parametrize("size", [64, 128])
def test_a_scale_that_is_a_tenth_off_is_named_in_nine_of_ten_groups(size: int) -> None:
    sample = quantize_by_gptq(size)
    assert sample.findings() == ()
    num_groups, seen = sample.weight.groups.num_groups, 0
    for number in range(10):
        group, factor = number * 331 % num_groups, (1.1, 0.9)[number % 2]
        found = sample.with_factor(group, factor).findings()
        assert len(found) <= 1
        for one in found:
            assert one.cause == "scale"
            assert one.amount == pytest.approx(factor, abs=0.06)
            assert one.place is not None
            assert one.place.rows.start == group // (COLUMNS // size)
        seen += len(found)
    assert seen >= 9


@pytest.mark.parametrize("size", [32, 64, 128])
def test_rows_of_larger_errors_are_no_finding(size: int) -> None:
    sample = quantize_by_gptq(size, rows=512, uneven=True)
    assert sample.findings() == ()
    across = COLUMNS // size
    for row in (3, 200, 400):
        found = sample.with_factor(row * across, 1 + 1.2 * sample.judge().resolution).findings()
        assert [one.place.rows.start for one in found if one.place is not None] == [row]


def test_the_scales_of_one_group_in_all_rows_are_not_the_usual_ones() -> None:
    sample = quantize_by_gptq(64)
    columns = COLUMNS // 64
    scales = sample.weight.scales.clone()
    scales[1::columns] *= 1.1
    wrong = Sample(sample.original, replace(sample.weight, scales=scales))
    assert len(wrong.findings()) > 90


@pytest.mark.parametrize(
    ("bits", "size", "rows"),
    [(4, 64, 256), (4, 32, 64), (3, 128, 256), (2, 64, 256), (8, 64, 256)],
)
def test_a_group_of_random_codes_is_found(bits: int, size: int, rows: int) -> None:
    sample = quantize_by_gptq(size, bits, rows)
    across, generator = COLUMNS // size, torch.Generator().manual_seed(bits)
    assert sample.findings() == ()
    for number in range(5):
        row, column = 13 * number % rows, number % across * size
        codes = sample.weight.codes.clone()
        drawn = torch.randint(0, 2**bits, (size,), generator=generator)
        codes[row, column : column + size] = drawn.to(torch.uint8)
        [finding] = Sample(sample.original, replace(sample.weight, codes=codes)).findings()
        assert finding.place is not None
        assert (finding.place.rows.start, finding.place.columns[0]) == (row, column)


def test_random_codes_of_the_same_columns_in_all_rows_are_found() -> None:
    sample = quantize_by_gptq(64, rows=256)
    codes = sample.weight.codes.clone()
    drawn = torch.randint(0, 16, (256, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 64:128] = drawn.to(torch.uint8)
    found = Sample(sample.original, replace(sample.weight, codes=codes)).findings()
    assert {one.place.columns[0] for one in found if one.place is not None} == {64}


@pytest.mark.parametrize(("bits", "size", "rows"), [(4, 64, 512), (4, 32, 64), (3, 128, 512)])
def test_a_scale_that_is_wrong_by_more_than_the_resolution_is_found(
    bits: int, size: int, rows: int
) -> None:
    sample = quantize_by_gptq(size, bits, rows)
    factor = 1 + 1.1 * sample.judge().resolution
    num_groups = sample.weight.groups.num_groups
    for number in range(6):
        [finding] = sample.with_factor(number * 331 % num_groups, factor).findings()
        assert finding.cause == "scale"
        assert 1 + 0.5 * (factor - 1) < finding.amount < 1.1 * factor


@pytest.mark.parametrize("rows", [32, 64])
def test_few_rows_are_not_pooled(rows: int) -> None:
    sample = quantize_by_gptq(64, rows=rows)
    assert pool_slopes(sample.weight, sample.original) is None
