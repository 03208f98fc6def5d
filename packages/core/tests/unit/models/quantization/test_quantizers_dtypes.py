"""Codes that quantizers round in the dtype of the model, and scales that they round again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.core.tests.unit.models.quantization.rounding import Tensors, no_fault, times
from packages.core.tests.unit.models.quantization.test_comparing import (
    FAULTY,
    NAMES,
    make_weights,
    where,
    write_actual,
    write_expected,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_listed", [True, False])
def test_int8_codes_may_be_rounded_from_products_in_16_bits(
    dtype: torch.dtype, is_listed: bool, tmp_path: Path
) -> None:
    """bitsandbytes 0.50 multiplies a 16-bit weight by 127 / its largest value in that dtype."""
    weight = make_weights(2)[NAMES[0]].to(dtype)
    largest = weight.abs().amax(1, keepdim=True)
    codes = (weight * (127 / largest)).round().clamp(-127, 127)
    stored = {"weight": codes.to(torch.int8), "SCB": largest[:, 0].float()}
    settings: dict[str, Any] = {"quant_method": "bitsandbytes"}

    def found(tensors: Tensors, name: str) -> tuple[Any, ...]:
        shard = {f"{NAMES[0]}.{part}": one for part, one in tensors.items()}
        actual = write_folder(tmp_path / name, [shard], settings)
        if not is_listed:  # the original is float32, and config.json names the dtype
            config = json.loads((actual / "config.json").read_text())
            config["dtype"] = str(dtype).removeprefix("torch.")
            (actual / "config.json").write_text(json.dumps(config))
        return compare_folders(expected, actual).findings

    original = {f"{NAMES[0]}.weight": weight if is_listed else weight.float()}
    expected = write_folder(tmp_path / "expected", [original])
    assert found(stored, "sound") == ()
    scales = stored["SCB"].clone()
    scales[5] *= 1.05
    [finding] = found(stored | {"SCB": scales}, "scaled")
    assert (finding.cause, where(finding.place)) == ("scale", (5, 0))
    wrong = stored["weight"].clone()
    wrong[9, ::3] += 1
    [finding] = found(stored | {"weight": wrong}, "coded")
    assert where(finding.place) == (9, 0)


def test_fp8_codes_may_be_rounded_from_quotients_in_bfloat16(tmp_path: Path) -> None:
    """llm-compressor 0.14 divides a bfloat16 weight by a bfloat16 scale before it rounds."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    scales = weight.abs().amax(1, keepdim=True) / 448
    shard = {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}
    settings = CASES["compressed-float8-channel"].settings
    expected = write_folder(tmp_path / "expected", [{f"{NAMES[0]}.weight": weight}])

    def found(name: str) -> tuple[Any, ...]:
        tensors = {f"{NAMES[0]}.{part}": one for part, one in shard.items()}
        return compare_folders(
            expected, write_folder(tmp_path / name, [tensors], settings)
        ).findings

    assert found("sound") == ()
    shard["weight_scale"] = scales.clone()
    shard["weight_scale"][100] *= 1.05
    [finding] = found("scaled")
    assert (finding.cause, where(finding.place)) == ("scale", (100, 0))


def test_a_zero_point_may_be_added_in_bfloat16(tmp_path: Path) -> None:
    """llm-compressor 0.14 adds the zero point to a bfloat16 quotient, which it rounds again."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(6)).bfloat16() + 1.5
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True)
    scales = ((high - low) / 255).float().bfloat16()
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    codes = (weight / scales + zeros).round().clamp(-128, 127)
    shard = {"weight": codes, "weight_zero_point": zeros, "weight_scale": scales}
    settings = CASES["compressed-int8-channel-zeros"].settings
    expected = write_folder(tmp_path / "expected", [{f"{NAMES[0]}.weight": weight}])

    def found(name: str) -> tuple[Any, ...]:
        tensors = {
            f"{NAMES[0]}.{part}": one if part == "weight_scale" else one.to(torch.int8)
            for part, one in shard.items()
        }
        return compare_folders(
            expected, write_folder(tmp_path / name, [tensors], settings)
        ).findings

    assert found("sound") == ()
    zeros[100] += 1
    [finding] = found("shifted")
    assert (finding.cause, where(finding.place)) == ("zero-point", (100, 0))


def test_nested_scales_of_uneven_blocks_are_as_precise_as_their_table(tmp_path: Path) -> None:
    """One row is 5 times as large, so that the scales of the others have few codes."""
    case, weights = CASES["bitsandbytes-nf4-nested"], make_weights(5)
    for weight in weights.values():
        weight[3] *= 5
    expected = write_expected(tmp_path / "expected", weights)
    sound = write_actual(tmp_path / "actual", case, weights, no_fault)
    assert not compare_folders(expected, sound).findings
    wrong = write_actual(tmp_path / "wrong", case, weights, times(1.3, 13))  # a group of row 3
    [finding] = compare_folders(expected, wrong).findings
    assert (finding.weight, where(finding.place)) == (FAULTY, (3, 64))
