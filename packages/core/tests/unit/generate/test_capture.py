"""A model whose code computes NaN in float64 only, as an overflowing mask of ProphetNet does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate import capture
from assay.generate.spec import GoldenSpec, InputOptions
from assay.runs import SilentProgress

INPUTS = InputOptions(prompt_length="4:6", max_new_tokens=2)


@pytest.fixture
def nan_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    return_nan(monkeypatch, ["float64"])


def return_nan(monkeypatch: pytest.MonkeyPatch, dtypes: list[str]) -> None:
    own = capture.load_reference

    def load(*arguments: Any, **options: Any) -> Any:
        loaded = own(*arguments, **options)
        if loaded.dtype in dtypes:
            head = loaded.model.get_submodule("lm_head")
            head.register_forward_hook(lambda _module, _inputs, output: output * torch.nan)
        return loaded

    monkeypatch.setattr(capture, "load_reference", load)


def capture_for(dtype: str, folder: Path) -> Any:
    spec = GoldenSpec(
        model="micro:llama",
        reference=parse_run("cpu/float32"),
        noise_for=[dtype],
        inputs=INPUTS,
        level="module",
        folder=folder,
    )
    return capture.capture_golden(spec, SilentProgress())


@pytest.mark.usefixtures("nan_in_float64")
def test_yardstick_of_a_narrow_candidate_is_then_of_float32(tmp_path: Path) -> None:
    golden = capture_for("bfloat16", tmp_path / "golden")
    assert golden.sections["bfloat16"].yardstick_dtype == "float32"
    assert (
        "the model computes NaN in float64: the exact reference for bfloat16 is in float32"
        in golden.notes
    )


@pytest.mark.usefixtures("nan_in_float64")
def test_candidate_in_float32_has_no_yardstick(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="computes NaN in float64, but not in float32"):
        capture_for("float32", tmp_path / "golden")


def test_model_that_computes_nothing_but_nan_is_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    return_nan(monkeypatch, ["float64", "float32"])
    with pytest.raises(UsageError, match="nothing but NaN as logits, in float64 and in float32"):
        capture_for("float32", tmp_path / "golden")


def test_other_models_keep_float64(tmp_path: Path) -> None:
    golden = capture_for("bfloat16", tmp_path / "golden")
    assert golden.sections["bfloat16"].yardstick_dtype == "float64"
    assert not [note for note in golden.notes if "NaN" in note]
