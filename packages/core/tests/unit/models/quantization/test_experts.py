"""Experts in MXFP4, as gpt-oss stores them: a tensor of all experts, whose last two dims are exchanged."""

from collections.abc import Callable
from math import ceil, log2
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.models.quantization.dequantizing import dequantize_folder
from assay.models.quantization.judging import WeightComparison, WeightRegion
from packages.core.tests.unit.models.quantization.rounding import round_to_grid
from packages.core.tests.unit.models.quantization.writers import compare_folders, write_folder

NAME = "model.layers.0.mlp.experts.down_proj"
EXPERTS, INPUTS, OUTPUTS, GROUP = 2, 128, 32, 32
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Edit = Callable[[Tensor, Tensor], None]


def write(folder: Path, edit: Edit = lambda codes, scales: None) -> tuple[Path, Path, Tensor]:
    """Return the folder of random experts, that of their codes, and the values of the codes.

    edit: changes codes [experts, outputs, inputs] and exponents [experts, outputs, groups].
    """
    weight = torch.randn(EXPERTS, INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(3)) / 50
    rows = weight.mT.reshape(-1, INPUTS)
    signed = [-one for one in LEVELS[:0:-1]] + LEVELS
    rounded = round_to_grid(
        rows, (1, GROUP), signed, "none", lambda scale: 2.0 ** ceil(log2(scale))
    )
    magnitudes = (rounded.codes.abs()[..., None] - torch.tensor(LEVELS)).abs().argmin(-1)
    codes = (magnitudes + 8 * (rounded.codes < 0)).view(EXPERTS, OUTPUTS, INPUTS).to(torch.uint8)
    scales = (rounded.scales.log2() + 127).view(EXPERTS, OUTPUTS, -1).to(torch.uint8)
    edit(codes, scales)
    pairs = codes.view(EXPERTS, OUTPUTS, -1, GROUP // 2, 2)
    shard = {
        f"{NAME}_blocks": pairs[..., 0] | pairs[..., 1] << 4,
        f"{NAME}_scales": scales,
        f"{NAME}_bias": torch.ones(EXPERTS, INPUTS),
    }
    original = {NAME: weight, f"{NAME}_bias": torch.ones(EXPERTS, INPUTS)}
    expected = write_folder(folder / "expected", [original])
    actual = write_folder(folder / "actual", [shard], {"quant_method": "mxfp4"})
    return expected, actual, rounded.values.view(EXPERTS, OUTPUTS, INPUTS).mT


def compare(folder: Path, edit: Edit = lambda codes, scales: None) -> WeightComparison:
    expected, actual, _ = write(folder, edit)
    return compare_folders(expected, actual)


def test_experts_have_the_shape_and_values_of_the_model(tmp_path: Path) -> None:
    _, actual, values = write(tmp_path)
    found = dequantize_folder(actual)
    assert found is not None
    assert found.quantized == {NAME}
    assert torch.equal(found[NAME], values)


def test_correct_experts_have_no_finding(tmp_path: Path) -> None:
    found = compare(tmp_path)
    assert (found.findings, found.not_compared, found.unmatched_expected) == ((), (), ())
    assert {one.name for one in found.results} == {NAME, f"{NAME}_bias"}
    assert found.num_groups == EXPERTS * OUTPUTS * INPUTS // GROUP + 1


def double(codes: Tensor, scales: Tensor) -> None:
    scales[1, 5, 2] += 1


def neighbor(codes: Tensor, scales: Tensor) -> None:
    """Give an output the exponents of one that has others."""
    scales[1, 5] = scales[1, 5] + 2


def nibbles(codes: Tensor, scales: Tensor) -> None:
    codes[1, 5] = codes[1, 5].view(-1, 2).flip(-1).flatten()


def groups(codes: Tensor, scales: Tensor) -> None:
    codes[1, 5] = codes[1, 5].view(-1, GROUP).flip(0).flatten()


def other_expert(codes: Tensor, scales: Tensor) -> None:
    codes[1, 5], scales[1, 5] = codes[0, 5], scales[0, 5]


@pytest.mark.parametrize("fault", [double, neighbor, nibbles, groups, other_expert])
def test_a_wrong_row_of_an_expert_is_named(fault: Edit, tmp_path: Path) -> None:
    findings = compare(tmp_path, fault).findings
    assert {one.weight for one in findings} == {NAME}
    row = OUTPUTS + 5  # of the second expert
    assert {one.place.rows for one in findings if one.place} == {range(row, row + 1)}
    if fault is double:
        assert findings[0].place == WeightRegion(range(row, row + 1), tuple(range(64, 96)))
