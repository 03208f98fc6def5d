"""Quantized folders as plain models: exact, and with the roundings of a library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from assay.errors import UsageError
from assay.models import load_model
from assay.models.quantization.dequantizing import dequantize_folder, is_quantized
from packages.core.tests.unit.models.inspect.test_inspection import write_fp8, write_mxfp4
from packages.core.tests.unit.models.quantization.rounding import no_fault
from packages.core.tests.unit.models.quantization.writers import CASES, write_folder

NAME = "model.layers.0.mlp.up_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
U = 2.0**-9  # unit roundoff of bfloat16


def stored(folder: Path, scale: float, codes: list[int]) -> Path:
    """Write one row of int8 with one scale."""
    tensors = {
        "_weight_qdata": torch.tensor([codes], dtype=torch.int8),
        "_weight_scale": torch.tensor([[scale]]),
    }
    named = {f"{NAME.removesuffix('weight')}{key}": value for key, value in tensors.items()}
    return write_folder(folder, [named], {"quant_method": "torchao"})


def dequantized(folder: Path, dtype: torch.dtype) -> list[float]:
    found = dequantize_folder(folder, dtype)
    assert found is not None
    return [float(one) for one in found[NAME][0]]


def test_a_scale_that_rounding_changes_is_rounded_before_the_product(tmp_path: Path) -> None:
    # 1 + 0.75 ulp rounds up to 1 + 2 U x 2. Of the product alone: 3.0088 to 3.0156 = 3 (1 + 2.67 U).
    folder = stored(tmp_path / "model", 1 + 3 * U, [1, 2, 4])
    assert dequantized(folder, torch.float32) == [1 + 3 * U, 2 + 6 * U, 4 + 12 * U]
    assert dequantized(folder, torch.bfloat16) == [1 + 4 * U, 2 + 8 * U, 4 + 16 * U]


def test_products_are_rounded_where_the_scale_is_exact(tmp_path: Path) -> None:
    # 3 x (1 + 4 U) = 3 + 12 U, halfway between 3 + 8 U and 3 + 16 U, which is even.
    folder = stored(tmp_path / "model", 1 + 4 * U, [3])
    assert dequantized(folder, torch.bfloat16) == [3 + 16 * U]


def test_a_case_without_rounding_is_bitwise_the_writers(tmp_path: Path) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    for name, case in CASES.items():
        tensors, values = case.write(weight, no_fault)
        shard = {f"{NAME.removesuffix('weight')}{key}": one for key, one in tensors.items()}
        found = dequantize_folder(write_folder(tmp_path / name, [shard], case.settings))
        assert found is not None
        assert found.quantized == {NAME}
        torch.testing.assert_close(found[NAME], values, rtol=1e-6, atol=1e-9)


def test_an_unknown_method_is_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", [{NAME: torch.ones(2, 2)}], {"quant_method": "other"})
    assert is_quantized(folder)
    assert dequantize_folder(folder) is None


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
def test_a_yardstick_has_the_exact_values_and_a_noise_run_rounded_ones(
    tmp_path: Path, write: object
) -> None:
    assert callable(write)
    folder = write(tmp_path)
    tensors = dequantize_folder(folder)
    assert tensors is not None
    exact = load_model(str(folder), dtype="float64", rounded_to="bfloat16", weights="dequantized")
    noisy = load_model(str(folder), dtype="bfloat16", weights="dequantized")
    assert exact.is_dequantized
    for name in sorted(tensors.quantized):
        assert torch.equal(exact.model.get_parameter(name), tensors[name].double())
        rounded = noisy.model.get_parameter(name)
        assert rounded.dtype is torch.bfloat16
        torch.testing.assert_close(rounded.float(), tensors[name], rtol=4 * U, atol=0)


def test_weights_that_stay_quantized_cannot_be_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = PreTrainedModel._finalize_model_loading

    def finish_quantized(model: Any, *arguments: Any) -> Any:
        model.config.quantization_config = {"quant_method": "torchao"}
        return finish(model, *arguments)

    monkeypatch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(finish_quantized))
    assert load_model("micro:llama", dtype="bfloat16").dtype == "bfloat16"
    for dtype, rounded_to in (("float64", None), ("float32", "bfloat16")):
        with pytest.raises(UsageError, match="quantized by torchao cannot be widened"):
            load_model("micro:llama", dtype=dtype, rounded_to=rounded_to)
