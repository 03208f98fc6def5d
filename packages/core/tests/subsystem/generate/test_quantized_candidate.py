"""`--candidate-model`: a quantized folder is judged by its own weights, and these by the original's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay import check_generate
from assay.api.verdict import CheckedVerdict
from assay.errors import UsageError
from assay.models import RECIPES
from packages.core.tests.unit.models.inspect.test_inspection import write_fp8

UP = "model.layers.1.mlp.up_proj"
MICRO = RECIPES["llama"].folder
_WEIGHTS = "model.safetensors"
_FEW = {"max_new_tokens": 4, "batch_size": 2}


def check(folder: Path, quantized: Path, **options: Any) -> CheckedVerdict:
    return check_generate(
        "micro:llama",
        candidate_model=quantized,
        reference="cpu/float32",
        candidate="cpu/bfloat16",
        output=folder / "run",
        **(_FEW | options),
    )


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    folder = tmp_path / "fp8"
    folder.mkdir()
    return write_fp8(folder)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / _WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})


@pytest.mark.long
def test_a_correct_folder_passes_and_its_format_has_a_price(tmp_path: Path, fp8: Path) -> None:
    verdict = check(tmp_path, fp8)
    assert verdict.passed, str(verdict)
    assert verdict.levels["weights"].compared == len(load_file(MICRO / _WEIGHTS))
    costs = [note for note in verdict.notes if note.startswith("cost of the format")]
    assert "relative error" in costs[0]
    assert "KL divergence" in costs[1]


@pytest.mark.long
def test_a_wrong_scale_in_the_files_is_a_fault_of_the_weights_alone(
    tmp_path: Path, fp8: Path
) -> None:
    def double(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale_inv"][3, 2] *= 2

    change(fp8, double)
    verdict = check(tmp_path, fp8)
    outcomes = {name: level.verdict for name, level in verdict.levels.items()}
    assert [name for name, one in outcomes.items() if one == "FAIL"] == ["weights"]
    assert verdict.diagnosis == "weight-mismatch"
    assert verdict.location is not None
    assert verdict.location.parameter == f"{UP}.weight"
    reason = str(verdict.levels["weights"].reason)
    assert "rows 48-63, columns 32-47: its scale is 2.0" in reason


def scale_two_percent(model: nn.Module) -> None:
    """Make an up projection 2 % too large, after the files were read."""
    weight = model.get_parameter(f"{UP}.weight")
    weight.data.mul_(1.02)


@pytest.mark.long
def test_a_fault_of_the_candidate_is_one_beyond_the_format(tmp_path: Path, fp8: Path) -> None:
    verdict = check(tmp_path, fp8, candidate_setup=f"{__file__}:scale_two_percent")
    outcomes = {name: level.verdict for name, level in verdict.levels.items()}
    assert outcomes["weights"] == "PASS"
    assert outcomes["modules"] == "FAIL"
    assert verdict.location is not None
    assert verdict.location.module == UP


@pytest.mark.long
def test_a_setting_that_the_quantizer_changed_fails(tmp_path: Path, fp8: Path) -> None:
    path = fp8 / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    verdict = check(tmp_path, fp8)
    assert verdict.levels["config"].verdict == "FAIL"
    assert "rms_norm_eps is 1e-06 in EXPECTED, 0.001 in ACTUAL" in str(verdict)


def test_a_folder_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not quantized, .* files .*: assay compare \S+ \S+$"):
        check(tmp_path, MICRO)
    assert not [*tmp_path.rglob("golden.json")]
