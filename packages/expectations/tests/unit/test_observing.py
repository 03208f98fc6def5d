"""Projections of logits, and the hardware part of a key. Shapes: R rows, V vocabulary, M projections."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP

from assay.devices.registry import open_device
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.models import RECIPES
from assay.models.config_files import record_settings
from assay.runs import SilentProgress
from assay_expectations.explaining import exact_change
from assay_expectations.observing import machine_of, observe_all, open_candidate
from assay_expectations.projections import NUM_PROJECTIONS, project, sign_patterns
from assay_expectations.records import (
    ReferenceRequest,
    Settings,
    VerifyRequest,
    read_expectation,
    write_expectation,
)
from assay_expectations.references import observe_references
from assay_expectations.verdict import SHIPPED
from packages.expectations.tests.unit.sample_expectations import expectation

if TYPE_CHECKING:
    from collections.abc import Callable


def splitmix64(number: int) -> int:
    """The published algorithm, with Python integers."""
    mask = (1 << 64) - 1
    mixed = number * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return mixed ^ mixed >> 31


def test_refusal_of_an_encoder_decoder_names_the_commands_of_a_golden(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 8, "vocab_size": 300}
    config = T5Config.from_dict(sizes | {"decoder_start_token_id": 0})
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError) as raised:
        open_candidate(str(tmp_path), parse_run("cpu/bfloat16"), Settings())
    assert str(raised.value).endswith(
        "is an encoder-decoder; `assay check generate` and `assay check load` are for it. To keep its outputs, and to"
        " verify them:\n"
        f"  assay capture {tmp_path} --run cpu/float32 --noise-for bfloat16 --output golden\n"
        f"  assay check generate {tmp_path} --candidate cpu/bfloat16 --golden golden"
    )


def test_signs_are_bits_of_splitmix64() -> None:
    # The published first output for seed 0.
    assert splitmix64(1) == 0xE220A8397B1DCDAF
    expected = [
        [1.0 - 2.0 * (splitmix64(number) >> bit & 1) for bit in range(NUM_PROJECTIONS)]
        for number in range(1, 301)
    ]
    assert sign_patterns(300).tolist() == expected


def test_projections_preserve_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    error_RV = torch.randn(200, 500, generator=generator, dtype=torch.float64)

    rms = project(error_RV).square().mean().sqrt().item()

    # 1,600 projections of unit variance: the root of their mean square is 1 within 2 %.
    assert abs(rms - error_RV.square().mean().sqrt().item()) < 0.06


def test_swapped_ids_are_detected() -> None:
    values_RV = torch.linspace(-20, -1, 300, dtype=torch.float64)[None]
    swapped_RV = values_RV.clone()
    swapped_RV[0, [17, 250]] = values_RV[0, [250, 17]]

    assert not torch.allclose(project(values_RV), project(swapped_RV))


def test_impossible_id_counts_as_zero_and_nan_propagates() -> None:
    values_RV = torch.tensor([[1.0, -torch.inf], [1.0, torch.nan]], dtype=torch.float64)
    projected = project(values_RV)

    assert torch.equal(projected[0], project(torch.tensor([[1.0, 0.0]]).double())[0])
    assert projected[1].isnan().all()


@pytest.mark.parametrize(
    ("run", "architecture", "precision"),
    [
        ("cpu/bfloat16", None, "bfloat16"),
        ("sim:truncate/bfloat16", "sim-truncate", "bfloat16"),
        ("sim:split4/bfloat16", "sim-split4", "bfloat16"),
        ("sim:fp8/bfloat16", "sim-fp8", "float8_e4m3fn"),
    ],
)
def test_variants_of_the_simulated_device_are_different_machines(
    run: str, architecture: str | None, precision: str
) -> None:
    parsed = parse_run(run)
    machine = machine_of(parsed, open_device(parsed.device))
    assert machine.architecture == architecture or "-" not in machine.architecture
    assert machine.precision == precision


def test_stored_dtype_is_read_by_either_name(tmp_path: Path) -> None:
    for name in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(f'{{"{name}": "bfloat16", "text": {{"dtype": "x"}}}}')
        assert record_settings(str(tmp_path)) == {"config.json: dtype": "bfloat16"}


def written_here(folder: Path) -> Path:
    """Write an expectation of this machine, in float32."""
    machine = machine_of(parse_run("cpu/float32"), open_device("cpu"))
    given = expectation()
    key = given.key.model_copy(update={"machine": machine})
    return write_expectation(given.model_copy(update={"key": key}), folder / "e.json")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
        (None, "has no weights: neither model.safetensors nor"),
        (b"cut", "is truncated or no safetensors file"),
    ],
)
def test_model_whose_weights_cannot_be_read_is_missing(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    if content is not None:
        (model / "model.safetensors").write_bytes(content)
    request = VerifyRequest(
        files=[str(written_here(tmp_path))], run="cpu/float32", model=str(model)
    )
    (seen,) = observe_all(request, SilentProgress()).seen
    assert seen.problem is None
    assert seen.missing is not None
    assert problem in seen.missing


def shipped_with(folder: Path, **key: object) -> str:
    """Write the shipped expectation of micro:llama with its settings, and other content of its key."""
    (shipped,) = SHIPPED.glob("cpu-*-float32-micro-llama.json")
    found = read_expectation(shipped)
    content = found.key.content.model_copy(update=key)
    key_of_file = found.key.model_copy(update={"content": content})
    update = {"config": record_settings("micro:llama"), "key": key_of_file}
    return str(write_expectation(found.model_copy(update=update), folder / "e.json"))


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("edited")


def refuse_rows(_: object, values: torch.Tensor) -> torch.Tensor:
    """Replace a forward: raise in a batch, as opposed to the probe of a single text."""
    if len(values) > 1:
        raise RuntimeError("edited")
    return values


@pytest.mark.parametrize(
    ("method", "replacement"),
    [("forward", refuse_rows), ("forward", refuse), ("__init__", refuse)],
)
@pytest.mark.parametrize("has_other_weights", [False, True])
def test_library_that_raises_is_not_blamed_on_the_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    method: str,
    replacement: "Callable[..., object]",
    has_other_weights: bool,
) -> None:
    file = shipped_with(tmp_path)
    shutil.copytree(RECIPES["llama"].folder, tmp_path / "model")
    if has_other_weights:
        weights = tmp_path / "model/model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    monkeypatch.setattr(LlamaMLP, method, replacement)
    request = VerifyRequest(files=[file], run="cpu/float32", model=str(tmp_path / "model"))
    (seen,) = observe_all(request, SilentProgress()).seen
    assert seen.has_recorded_files is not has_other_weights
    assert "edited" in str(seen.problem)
    assert "RuntimeError: edited" in capfd.readouterr().err


def test_weights_that_were_rounded_are_called_so(tmp_path: Path) -> None:
    (shipped,) = SHIPPED.glob("cpu-*-float32-micro-llama.json")
    weights = {
        name: one.model_copy(update={"dtype": "F32", "hash": "of other values"})
        for name, one in read_expectation(shipped).key.content.weights.items()
    }
    request = VerifyRequest(files=[shipped_with(tmp_path, weights=weights)], run="cpu/float32")
    (seen,) = observe_all(request, SilentProgress()).seen
    assert seen.stale[1] == "all 39 tensors changed dtype, and their values were rounded"


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_changed_code_moves_the_yardstick_with_the_recorded_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    shutil.copytree(RECIPES["llama"].folder, tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-2}))
    forward = cast("Callable[..., torch.Tensor]", LlamaMLP.forward)
    monkeypatch.setattr(LlamaMLP, "forward", lambda *given: factor * forward(*given))
    (shipped,) = SHIPPED.glob("cpu-*-float32-micro-llama.json")
    recorded = {"config": record_settings("micro:llama")}
    captured = read_expectation(shipped).model_copy(update=recorded)
    file = write_expectation(captured, tmp_path / "e.json")
    request = ReferenceRequest(
        run="cpu/float32",
        model=str(tmp_path / "model"),
        is_patched=False,
        sketches={str(file): {}},
    )
    (found,) = observe_references(request, SilentProgress())
    signature = captured.signature
    assert exact_change(signature, found.yardstick) > 1e-5
    assert found.restored is not None
    assert (exact_change(signature, found.restored.yardstick) > 1e-9) is (factor != 1)
