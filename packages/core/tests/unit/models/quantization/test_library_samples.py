"""Weights that the formats' own libraries have written, with the values that these read back.

`library_samples.safetensors`: one weight of 32 x 128 (`original`), quantized on a CPU by
bitsandbytes 0.50.2 (`Linear4bit`, `int8_vectorwise_quant`), compressed-tensors 0.20.0
(`calculate_qparams`, `BaseCompressor.compress`), Transformers 5.23.0 (`Fp8Quantize`),
AutoGPTQ 0.7.1 (`GPTQ.fasterquant` on correlated inputs, `QuantLinear.pack`) and
AutoAWQ 0.2.9 (`pseudo_quantize_tensor`, `WQLinear_GEMM.from_linear`). NAME/stored/... is what the library
stores, NAME/values its own dequantization, rounded to float16.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from assay.models.quantization.formats.protocol import Format
from assay.models.quantization.formats.registry import list_weights
from assay.models.quantization.stored import WeightStore, open_folder
from packages.core.tests.unit.models.quantization.rounding import (
    Tensors,
)
from packages.core.tests.unit.models.quantization.writers import (
    compare_folders,
    write_folder,
)

MODULE = "model.layers.0.mlp.up_proj"
SAMPLES = Path(__file__).parent / "library_samples.safetensors"

with safe_open(SAMPLES, "pt") as samples:
    SETTINGS: dict[str, dict[str, Any]] = {
        name: json.loads(text) for name, text in samples.metadata().items() if name != "versions"
    }


def read(name: str) -> tuple[Tensors, Tensor, Tensor]:
    """What is stored, its values, and the original weight."""
    prefix = f"{name}/stored/"
    with safe_open(SAMPLES, "pt") as file:
        stored = {
            key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)  # noqa: SIM118 - it is no mapping
        }  # fmt: skip
        return stored, file.get_tensor(f"{name}/values"), file.get_tensor("original/values").float()


def write(folder: Path, name: str, stored: Tensors) -> Path:
    return write_folder(folder, [{f"{MODULE}.{k}": v for k, v in stored.items()}], SETTINGS[name])


def form_of(stored: WeightStore) -> Format:
    [form] = [one for one in list_weights(stored).values() if one is not None]
    return form


every_sample = pytest.mark.parametrize("name", sorted(SETTINGS))


@every_sample
def test_values_are_those_that_the_library_reads(name: str, tmp_path: Path) -> None:
    stored, values, _ = read(name)
    opened = open_folder(write(tmp_path / "model", name, stored))
    read_back = form_of(opened).read(opened, MODULE).dequantize()
    torch.testing.assert_close(read_back, values.float(), rtol=1e-3, atol=1e-7)


@every_sample
def test_what_a_library_wrote_is_no_finding(name: str, tmp_path: Path) -> None:
    stored, _, original = read(name)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": original}])
    found = compare_folders(expected, write(tmp_path / "actual", name, stored))
    assert not found.findings
    assert [one.name for one in found.results] == [f"{MODULE}.weight"]
    assert found.results[0].error < (2.6 if "gptq" in name else 1.4) * found.results[0].best


@pytest.mark.parametrize(
    "name", sorted({*SETTINGS} - {"bitsandbytes-nf4-nested", "transformers-fp8-ue8m0"})
)
def test_scale_that_is_wrong_by_twice_the_resolution_is_named(name: str, tmp_path: Path) -> None:
    """A tenth is seen in all but GPTQ's groups of 64, and 3 bits."""
    stored, _, original = read(name)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": original}])
    sound = write(tmp_path / "sound", name, stored)
    resolution = compare_folders(expected, sound).results[0].resolution
    factor = max(1.1, 1 + 2 * resolution)
    scales = stored[form_of(open_folder(sound)).scales].clone()
    scales.view(-1)[scales.numel() // 2] *= factor
    stored[form_of(open_folder(sound)).scales] = scales
    [finding] = compare_folders(expected, write(tmp_path / "actual", name, stored)).findings
    assert finding.cause == "scale"
    assert finding.amount == pytest.approx(factor, rel=0.15)
