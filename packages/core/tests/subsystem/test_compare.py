"""`assay compare` on dumps of a real model, with and without a trusted model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import assay
from assay.comparison.pairing.passes import find_passes
from assay.comparison.replaying import TrustedModel, record_reference
from assay.dumps.protocol import DumpError
from assay.dumps.recognizing import open_dump
from assay.models import load_model
from assay.verdicts import Outcome
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.subsystem.commands import run_in_process

IDS = torch.arange(3, 27)[None]

LONG_IDS = torch.randint(5, 250, (4, 100), generator=torch.Generator().manual_seed(0))
ACT_FN = "bert.encoder.layer.0.intermediate.intermediate_act_fn"


def dump(folder: Path, scale: float = 1.0) -> Path:
    model: Any = load_model("micro:llama", dtype="float32").model
    model.model.layers[1].mlp.down_proj.weight.data *= scale
    with assay.capture(model, folder):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return dump(folder / "golden"), dump(folder / "mine", 1.02)


@pytest.mark.parametrize("model", [None, "micro:llama"])
def test_a_wrong_weight_is_located(
    dumps: tuple[Path, Path], tmp_path: Path, model: str | None
) -> None:
    verdict = assay.compare(*dumps, model=model, output=tmp_path / "out")
    assert verdict.location is not None
    assert verdict.location.module == "model.layers.1.mlp.down_proj"
    evidence = "recomputed from its dumped inputs" if model else "its inputs agree"
    assert evidence in str(verdict.levels["modules"].reason)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_weight_of_another_folder_is_located_in_a_verdict_that_can_be_read(
    tmp_path: Path,
) -> None:
    for name, scale in (("golden", 1.0), ("mine", 1.02)):
        model: Any = load_model("micro:llama", dtype="float32").model
        model.model.layers[1].mlp.down_proj.weight.data *= scale
        model.save_pretrained(tmp_path / name)

    run = run_in_process(tmp_path / "out", "compare", tmp_path / "golden", tmp_path / "mine")

    assert run.code == 1, run.stderr
    assert run.verdict["diagnosis"] == "weight-mismatch"
    place = run.verdict["location"]
    assert (place["parameter"], place["step"]) == ("model.layers.1.mlp.down_proj.weight", 0)
    assert "model.layers.1.mlp.down_proj" in run.stdout


def test_a_right_dump_replays_without_a_finding(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    verdict = assay.compare(dumps[0], dumps[0], model="micro:llama", output=tmp_path / "out")
    assert verdict.passed
    assert any("module boundaries of ACTUAL that are replayed" in note for note in verdict.notes)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("damaged")])
@pytest.mark.parametrize(
    ("scale", "outcome", "module"),
    [(1.0, Outcome.NOT_COMPARED, None), (1.02, Outcome.FAIL, "model.layers.1.mlp")],
)
def test_a_result_that_a_dump_lacks_is_part_of_the_noise_of_its_parent(
    tmp_path: Path, spoil: Any, scale: float, outcome: Outcome, module: str | None
) -> None:
    for name, factor in (("golden", 1.0), ("mine", scale)):
        model: Any = load_model("micro:llama", dtype="float32").model
        model.model.layers[1].mlp.down_proj.weight.data *= factor
        with torch.no_grad(), dumped(model, tmp_path / name):
            model(IDS)
    (file,) = (tmp_path / "mine").rglob("*layers.1.mlp.down_proj*output.0.pt")
    spoil(file)
    verdict = assay.compare(
        tmp_path / "golden", tmp_path / "mine", model="micro:llama", output=tmp_path / "out"
    )
    assert verdict.verdict is outcome
    assert (verdict.location.module if verdict.location else None) == module


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, Outcome.PASS), (1 + 2e-6, Outcome.FAIL)])
def test_functions_of_another_library_are_noise(
    tmp_path: Path, factor: float, outcome: Outcome
) -> None:
    """Without oneDNN, PyTorch approximates GELU with a systematic error of half a unit roundoff."""
    golden, mine = (load_model("micro:bert", dtype="float32").model for _ in range(2))
    with torch.no_grad(), assay.capture(golden, tmp_path / "golden"):
        golden(LONG_IDS)
    act_fn: Any = mine.get_submodule(ACT_FN)
    act_fn.register_forward_hook(lambda module, inputs, result: result * factor)
    without_mkldnn = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    with torch.no_grad(), without_mkldnn, assay.capture(mine, tmp_path / "mine"):
        mine(LONG_IDS)
    verdict = assay.compare(
        tmp_path / "golden", tmp_path / "mine", model="micro:bert", output=tmp_path / "out"
    )
    assert verdict.verdict is outcome
    if outcome is Outcome.FAIL:
        assert verdict.location is not None
        assert verdict.location.module == ACT_FN


def test_a_model_that_replays_nothing_is_refused(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="so it is another model"):
        assay.compare(*dumps, model="micro:bert", output=tmp_path / "out")


def dump_batches(folder: Path, batches: list[list[int]]) -> Path:
    """Generate from prompts of these lengths, batch by batch, padded on the left."""
    loaded = load_model("micro:llama", dtype="float32")
    model: Any = loaded.model
    with assay.capture(model, folder):
        for lengths in batches:
            mask = (
                torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
            ).long()
            prompts = [torch.arange(100 - length, 100) for length in lengths]
            ids = torch.full(mask.shape, loaded.pad_token_id or 0)
            for row, prompt in zip(ids, prompts, strict=True):
                row[-len(prompt) :] = prompt
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    return folder


def test_padding_masks_of_other_batches_forbid_no_pass(tmp_path: Path) -> None:
    expected = dump_batches(tmp_path / "golden", [[8, 12, 24]])
    actual = dump_batches(tmp_path / "mine", [[8, 12], [24]])
    verdict = assay.compare(expected, actual, output=tmp_path / "out")
    assert verdict.passed, verdict.levels["completeness"].reason


def test_the_yardstick_is_in_double_precision_throughout(
    dumps: tuple[Path, Path], tmp_path: Path
) -> None:
    # Models of Hugging Face compute rotary tables in float32 whatever the dtype of their weights.
    passes = find_passes(open_dump(dumps[0]))
    reference = record_reference(TrustedModel("micro:llama"), passes, "float32", tmp_path / "trace")
    trace = reference.trace
    (cosine, *_) = [
        trace.tensor(call, "output.0")
        for call in trace.calls
        if call.site.module == "model.rotary_emb"
    ]
    assert not torch.equal(cosine, cosine.float().double())
