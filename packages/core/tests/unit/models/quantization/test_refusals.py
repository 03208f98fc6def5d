"""Files that contradict themselves: one message that names file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.errors import UsageError
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Tensors,
    no_fault,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)

MODULE = "model.layers.0.mlp.up_proj"


def refusal(
    tmp_path: Path,
    case: Case,
    changes: dict[str, Tensor | None],
    settings: dict[str, Any] | None = None,
) -> str:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    stored: Tensors = {
        f"{MODULE}.{key}": one for key, one in case.write(weight, no_fault)[0].items()
    }
    for key, value in changes.items():
        if value is None:
            del stored[f"{MODULE}.{key}"]
        else:
            stored[f"{MODULE}.{key}"] = value
    actual = write_folder(tmp_path / "actual", [stored], dict(case.settings) | (settings or {}))
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": weight}])
    with pytest.raises(UsageError) as caught:
        compare_folders(expected, actual)
    return str(caught.value).replace(f"{tmp_path}/actual/", "").replace(f"{MODULE}.", "")


FILE = "model-00001-of-00001.safetensors"
INTS = torch.zeros(31, 32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq4-64", {"scales": None}, "qweight is quantized, but scales is missing"),
        ("gptq4-64", {"qzeros": None}, "qweight is quantized, but qzeros is missing"),
        ("gptq4-64", {"qweight": INTS}, "qweight has 31 words a column for 256 inputs of 4 bits"),
        ("gptq4-64", {"qzeros": INTS}, "qzeros has the shape [31, 32], expected [4, 4]"),
        ("gptq4-64", {"g_idx": torch.full((256,), 9)}, "g_idx does not divide 256 columns into groups of 64"),
        ("gptq4-64", {"g_idx": -torch.ones(256, dtype=torch.int64)}, "g_idx does not divide 256 columns into groups of 64"),
        ("awq", {"scales": torch.ones(4, 31)}, "scales has the shape [4, 31], expected [4, 32]"),
        ("awq", {"qzeros": None}, "qweight is quantized, but qzeros is missing"),
        ("compressed-pack4-group", {"weight_packed": INTS}, "weight_packed has the shape [31, 32] for [32, 256] values of 4 bits"),
        ("compressed-pack4-group", {"weight_shape": None}, "weight_packed is quantized, but weight_shape is missing"),
        ("compressed-pack4-group", {"weight_scale": torch.ones(32, 3)}, "weight_scale has 96 values for 32 x 4 groups"),
        ("compressed-pack4-group-zeros", {"weight_zero_point": None}, "weight_packed is quantized, but weight_zero_point is missing"),
        ("compressed-float8-block", {"weight": torch.zeros(32, 256)}, "weight of dtype torch.float32 does not hold float8"),
        ("compressed-int8-group", {"weight_shape": torch.tensor([1, 1]), "weight": torch.zeros(3, 3, 3)}, "weight has the shape [3, 3, 3], expected [any, any]"),
        ("bitsandbytes-nf4", {"weight": torch.zeros(7, 1, dtype=torch.uint8)}, "weight has 7 bytes for 32 x 256 values of 4 bits"),
        ("bitsandbytes-nf4", {"weight.quant_map": None}, "weight is quantized, but weight.quant_map is missing"),
        ("bitsandbytes-nf4", {"weight.absmax": torch.ones(5)}, "weight.absmax has 5 values for 128 x 1 groups"),
        ("bitsandbytes-nf4-nested", {"weight.nested_absmax": torch.ones(9)}, "weight.nested_absmax has the shape [9], expected [1]"),
        ("bitsandbytes-int8", {"SCB": torch.ones(31)}, "SCB has the shape [31], expected [32]"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(3, 3)}, "weight_scale_inv has 9 values for 2 x 4 groups"),
        ("fp8-blocks", {"weight": torch.zeros(32, 256)}, "weight of dtype torch.float32 is not fp8"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, CASES[name], changes) == f"{FILE}: {message}"


@pytest.mark.parametrize(
    ("name", "settings", "shown"),
    [
        ("gptq4-64", {"group_size": 0}, "group_size = 0"),
        ("gptq4-64", {"group_size": -5}, "group_size = -5"),
        ("gptq4-64", {"group_size": "64"}, "group_size = 64"),
        ("gptq4-64", {"bits": 16}, "bits = 16"),
        ("gptq4-64", {"bits": None}, "bits = None"),
        ("awq", {"version": "gemv"}, "version = gemv"),
        ("awq", {"group_size": 0}, "group_size = 0"),
        ("compressed-int8-group", {"config_groups": None}, "config_groups = None"),
        ("fp8-blocks", {"weight_block_size": [0, 64]}, "weight_block_size = [0, 64]"),
        (
            "compressed-int8-group",
            {"config_groups": {"group_0": 3}},
            "config_groups = {'group_0': 3}",
        ),
        ("fp8-blocks", {"weight_block_size": 128}, "weight_block_size = 128"),
    ],
)
def test_settings_that_cannot_be_read(
    name: str, settings: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    message = f"config.json: quantization_config.{shown} cannot be read"
    assert refusal(tmp_path, CASES[name], {}, settings) == message


def test_group_size_zero_of_compressed_tensors(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 0}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    text = refusal(tmp_path, CASES["compressed-int8-group"], {}, {"config_groups": groups})
    assert text.startswith("config.json: quantization_config.config_groups = ")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"shape": [32, 256], "blocksize": 0}, "has shape [32, 256] and blocksize 0"),
        ({"shape": [32, -256], "blocksize": 64}, "has shape [32, -256] and blocksize 64"),
        (
            {"shape": [32, 256], "blocksize": 1 << 40},
            "has shape [32, 256] and blocksize 1099511627776",
        ),
        ({"shape": None, "blocksize": 64}, "has shape None and blocksize 64"),
        ({"shape": "3" * 5, "blocksize": 64}, "has shape 33333 and blocksize 64"),
    ],
)
def test_states_of_bitsandbytes_that_cannot_be(
    state: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    name = "weight.quant_state.bitsandbytes__nf4"
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    assert refusal(tmp_path, CASES["bitsandbytes-nf4"], {name: text}) == f"{FILE}: {name} {problem}"


def test_state_of_bitsandbytes_that_is_no_json(tmp_path: Path) -> None:
    name = "weight.quant_state.bitsandbytes__nf4"
    text = torch.tensor([123, 255, 0], dtype=torch.uint8)
    assert FILE in refusal(tmp_path, CASES["bitsandbytes-nf4"], {name: text})


def test_unknown_method_lists_the_known_ones(tmp_path: Path) -> None:
    text = refusal(tmp_path, CASES["awq"], {}, {"quant_method": "aqlm"})
    assert text == (
        f"{tmp_path}/actual: the quantization method aqlm cannot be read; known methods:"
        " awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, torchao,"
        " auto_round:auto_gptq, auto_round:auto_awq, auto_round:fp8, auto_round:llm_compressor"
    )


def test_groups_larger_than_the_weight_take_no_memory(tmp_path: Path) -> None:
    case = CASES["gptq8--1"]
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    stored = {f"{MODULE}.{key}": one for key, one in case.write(weight, no_fault)[0].items()}
    settings = dict(case.settings) | {"group_size": (1 << 30) - 1}
    actual = write_folder(tmp_path / "actual", [stored], settings)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": weight}])
    assert not compare_folders(expected, actual).findings
