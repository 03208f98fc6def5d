"""Wrong codes in a small part of a group."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.models.quantization.judging import JudgedWeight, WeightFault, deviations_allowed
from assay.models.quantization.measuring import measure_groups
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from packages.core.tests.unit.models.quantization.test_measuring import quantize_by_gptq

SHAPE = ROWS, COLUMNS = 256, 2048
INT4, FP8 = Grid.of_unsigned(4), Grid.of_dtype(torch.float8_e4m3fn)
FORMATS = {
    "int4 per tensor": (INT4, SHAPE, 8.0),
    "int4 per row": (INT4, (1, COLUMNS), 8.0),
    "fp8 per tensor": (FP8, SHAPE, 0.0),
    "fp8 per block": (FP8, (128, 128), 0.0),
    "fp8 per row": (FP8, (1, COLUMNS), 0.0),
}


def round_to_nearest(name: str) -> tuple[QuantizedWeight, Tensor]:
    """Return a weight and its original, which has normal values."""
    grid, block, middle = FORMATS[name]
    original = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.05
    groups = Groups(SHAPE, block)
    scale = float(original.abs().max() / (grid.levels[-1] - middle))
    values = grid.levels[grid.nearest(original / scale + middle).long()]
    codes = (
        values.to(torch.uint8) if grid is INT4 else values.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    scales = torch.full((groups.num_groups,), scale)
    return QuantizedWeight(codes, grid, groups, scales, 0.0, middle=middle), original


def find(weight: QuantizedWeight, original: Tensor) -> tuple[WeightFault, ...]:
    errors = measure_groups(weight, original)
    limit = deviations_allowed(weight.groups.num_groups)
    return JudgedWeight("w", "f", weight, original, errors, limit, 2.0**-24).judge().findings


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["random", "zero", "of another row"])
def test_64_wrong_codes_are_found_in_their_row(name: str, kind: str) -> None:
    weight, original = round_to_nearest(name)
    assert find(weight, original) == ()
    codes = weight.codes.clone()
    drawn = torch.randint(
        0, 16 if weight.grid is INT4 else 0x7E, (64,), generator=torch.Generator().manual_seed(3)
    ).to(torch.uint8)
    wrong = {"random": drawn, "zero": torch.zeros_like(drawn), "of another row": codes[9, 640:704]}
    codes[77, 128:192] = wrong[kind]

    [finding] = find(replace(weight, codes=codes), original)
    assert finding.place is not None
    if finding.cause == "values":  # the error of random codes may also resemble that of a scale
        assert finding.place.rows == range(77, 78)
    assert 77 in finding.place.rows
    assert set(range(128, 192)) <= set(finding.place.columns)


@pytest.mark.parametrize(
    ("bits", "size", "part"), [(4, 128, 4), (4, 128, 2), (4, 32, 4), (3, 128, 2), (8, 64, 4)]
)
def test_random_codes_in_a_part_of_a_group_of_gptq_are_found(
    bits: int, size: int, part: int
) -> None:
    sample = quantize_by_gptq(size, bits, 512)
    generator = torch.Generator().manual_seed(part)
    columns = torch.randperm(size, generator=generator)[: size // part]
    codes = sample.weight.codes.clone()
    drawn = torch.randint(0, 2**bits, (len(columns),), generator=generator)
    codes[33, columns] = drawn.to(torch.uint8)

    [finding] = find(replace(sample.weight, codes=codes), sample.original)
    assert finding.place is not None
    assert finding.place.rows == range(33, 34)
    assert finding.place.columns == tuple(range(size))


def test_codes_of_gptq_need_not_differ_from_rounding_in_all_groups() -> None:
    """With inputs that hardly correlate, GPTQModel 7.7 moves 6 % of the codes by one."""
    weight, original = round_to_nearest("int4 per row")
    moved = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) < 0.06
    codes = torch.where(moved, weight.codes + 1, weight.codes).clamp(max=15)
    codes[5, torch.rand(COLUMNS, generator=torch.Generator().manual_seed(2)) < 0.2] += 1

    assert find(replace(weight, codes=codes.clamp(max=15)), original) == ()
