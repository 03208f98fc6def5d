"""Training of micro models, shortened to a few steps."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from assay.errors import UsageError
from assay.models import RECIPES, load_model
from assay.models.micro.recipes import new_model
from assay.models.micro_training import _windows, attend_to_neighbors, build_model


@pytest.fixture
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bytes(range(32, 127)) * 40
    short = {name: dataclasses.replace(recipe, steps=3, rows=1) for name, recipe in RECIPES.items()}
    monkeypatch.setattr("assay.models.micro.recipes.RECIPES", short)
    monkeypatch.setattr("assay.models.micro_training.standard_library_text", lambda: (text, text))
    monkeypatch.setattr("assay.models.micro_training._LONG_TOKENS", 300)
    monkeypatch.setattr("assay.models.micro_training._HELD_OUT_BYTES", 1088)


@pytest.mark.parametrize("name", list(RECIPES))
def test_built_model_is_a_folder_with_its_provenance(
    name: str, tmp_path: Path, short_training: None
) -> None:
    seen: list[tuple[int, int]] = []
    report = build_model(
        name, tmp_path / "out", lambda step, steps, _: seen.append((step, steps)), num_threads=1
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert math.isfinite(report.held_out_loss)
    loaded = load_model(str(tmp_path / "out"), dtype="bfloat16")
    assert loaded.checkpoint_dtype == "bfloat16"
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert set(record["sha256"]) >= {"config.json", "model.safetensors"}
    assert record["command"] == f"assay models build {name} --seed 0 --threads 1"


def test_equal_seeds_give_equal_weights(tmp_path: Path, short_training: None) -> None:
    contents = []
    for label, seed in (("first", 3), ("again", 3), ("other", 4)):
        build_model("llama", tmp_path / label, lambda *_: None, seed=seed, num_threads=1)
        contents.append((tmp_path / label / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not empty"):
        build_model("llama", tmp_path, lambda *_: None)


def test_windows_are_the_begin_token_and_the_bytes_after_each_start() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    windows = _windows(text, torch.tensor([0, 7]), 4)
    assert windows.tolist() == [[256, 0, 1, 2], [256, 7, 8, 9]]


def test_heads_of_an_untrained_encoder_find_their_neighbours() -> None:
    recipe = RECIPES["bert"]
    model = new_model(recipe, seed=0).eval()
    attend_to_neighbors(model, num_heads=5)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probabilities = model(input_ids=ids, output_attentions=True).attentions[0][0]
    places = torch.arange(8, 56)  # far enough from both ends for every neighbour to exist
    for head, offset in enumerate((-2, -1, 0, 1, 2)):
        by_offset = [probabilities[head, places, places + by].mean() for by in range(-8, 9)]
        assert torch.stack(by_offset).argmax() == 8 + offset
