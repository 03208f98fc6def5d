"""Models whose code computes NaN in float64 only, as an overflowing mask of ProphetNet does; noise of attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate import capture
from assay.generate.golden import NOISE
from assay.generate.spec import GoldenSpec, InputOptions
from assay.judge.results import read_results
from assay.runs import SilentProgress
from assay.trace import Trace

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


def test_noise_of_rows_is_that_of_fused_attention_where_it_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention happens to round four nearly equal weights to exactly a quarter each."""

    def use_less_accurate(model: nn.Module) -> bool:
        projection = model.get_submodule("model.layers.0.self_attn.o_proj")
        projection.register_forward_pre_hook(lambda _, inputs: (1.03125 * inputs[0],))
        return True

    monkeypatch.setattr(capture, "use_fused_attention", use_less_accurate)
    capture_for("bfloat16", tmp_path / "golden")
    noise = read_results(Trace.open(tmp_path / "golden" / "bfloat16"), NOISE)
    slopes = [
        noise.ports[f"model.layers.{layer}.self_attn.o_proj", "input.input"].sums.row_slope()[0]
        for layer in (0, 1)
    ]
    assert slopes[0] == pytest.approx(0.03125, rel=0.1)
    assert slopes[1] < 0.002
