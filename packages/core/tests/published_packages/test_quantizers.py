"""Models that torchao and bitsandbytes quantize: `nox -s published-packages`."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from packages.core.tests.subsystem.generate.test_quantized_candidate import MICRO, check

_TORCHAO: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("Int8WeightOnlyConfig", {"version": 2}),
    "int8-groups": ("Int8WeightOnlyConfig", {"version": 2, "granularity": 32}),
    "int8-inputs": ("Int8DynamicActivationInt8WeightConfig", {"version": 2}),
    "int4": ("IntxWeightOnlyConfig", {"weight_dtype": "int4", "granularity": 32}),
    "float8": ("Float8WeightOnlyConfig", {"version": 2}),
}


@pytest.mark.parametrize("name", _TORCHAO)
def test_torchao_passes(tmp_path: Path, name: str) -> None:
    quantization = importlib.import_module("torchao.quantization")
    kind, settings = _TORCHAO[name]
    if "weight_dtype" in settings:
        settings = settings | {"weight_dtype": getattr(torch, settings["weight_dtype"])}
    if "granularity" in settings:
        settings = settings | {"granularity": quantization.PerGroup(settings["granularity"])}
    config = TorchAoConfig(getattr(quantization, kind)(**settings))
    save_quantized(tmp_path, config)
    verdict = check(tmp_path, tmp_path / "quantized")
    assert verdict.passed, str(verdict)


def test_bitsandbytes_passes(tmp_path: Path) -> None:
    save_quantized(tmp_path, BitsAndBytesConfig(load_in_8bit=True))
    verdict = check(tmp_path, tmp_path / "quantized")
    assert verdict.passed, str(verdict)


def save_quantized(folder: Path, config: Any) -> None:
    """Quantize the micro model in bfloat16 by its library."""
    AutoModelForCausalLM.from_pretrained(MICRO, dtype=torch.bfloat16).save_pretrained(
        folder / "narrow"
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder / "narrow", dtype="auto", quantization_config=config
    )
    model.save_pretrained(folder / "quantized")
