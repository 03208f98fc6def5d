"""Models that transformers dequantizes as it loads them on the CPU: fp8 with block scales, MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from assay.models import RECIPES, load_model
from assay.models.loaded.inspection import inspect_load
from assay.models.loaded.report import LoadReport

UP = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_fp8(folder: Path) -> Path:
    """Store the linear layers of the small Llama in fp8, one scale for 16 x 16 values."""
    source = RECIPES["llama"].folder
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).view(weight.shape)
        tensors[name], tensors[f"{name}_scale_inv"] = codes.to(torch.float8_e4m3fn), scales
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = json.loads((source / "config.json").read_text())
    return write(folder, tensors, config | {"quantization_config": settings})


def write_mxfp4(folder: Path) -> Path:
    """Store random codes as the experts of a GPT-OSS of two layers."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, value in GptOssForCausalLM(config).bfloat16().state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write(folder, tensors, config.to_dict() | {"quantization_config": settings})


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inspected(folder: Path, dtype: str = "bfloat16") -> LoadReport:
    return inspect_load(load_model(str(folder), dtype=dtype), "refuse").report


every_form = pytest.mark.parametrize(
    ("write_folder", "wrong"), [(write_fp8, UP), (write_mxfp4, EXPERTS)]
)


@every_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dequantized_weights_are_those_of_the_files(
    write_folder: Any, wrong: str, dtype: str, tmp_path: Path
) -> None:
    report = inspected(write_folder(tmp_path), dtype)
    assert (report.weights, report.not_compared, report.settings) == ([], [], [])
    assert report.compared > 20


@every_form
def test_a_dequantized_weight_that_is_two_percent_too_large_is_named(
    write_folder: Any, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = PreTrainedModel._finalize_model_loading

    def finish_and_scale(model: Any, *arguments: Any) -> Any:
        info = finish(model, *arguments)
        with torch.no_grad():
            model.get_parameter(wrong).mul_(1.02)
        return info

    monkeypatch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(finish_and_scale))
    report = inspected(write_folder(tmp_path))
    assert [(one.name, one.problem) for one in report.weights] == [(wrong, "differs")]
    assert report.weights[0].error == pytest.approx(0.02, abs=4e-3)


def test_values_of_a_block_are_codes_times_a_power_of_two(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path)
    stored = load_file(folder / "model.safetensors")
    byte, scale = stored[f"{EXPERTS}_blocks"][2, 5, 0, 3], stored[f"{EXPERTS}_scales"][2, 5, 0]
    low, high = int(byte) % 16, int(byte) // 16
    values = [float((-1) ** (one // 8) * E2M1[one % 8]) for one in (low, high)]
    held = load_model(str(folder), dtype="float32").model.get_parameter(EXPERTS)
    assert held[2, 6:8, 5].tolist() == [value * 2.0 ** (int(scale) - 127) for value in values]
