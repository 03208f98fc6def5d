"""`assay models`."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay.cli.commands.models import app
from assay.errors import UsageError
from assay.models import RECIPES


def test_the_list_names_every_recipe_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = CliRunner().invoke(app, ["list"]).stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [f"micro:{name}" for name in RECIPES]
    assert all("nats per" in line for line in lines)


def test_a_recipe_whose_weights_are_absent_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.models.micro.recipes.WEIGHTS", tmp_path)
    assert CliRunner().invoke(app, ["list"]).stdout.count("not installed") == len(RECIPES)
    record = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert record == {"schema": 1, "models": dict.fromkeys(RECIPES)}


def test_the_list_as_json_holds_how_each_model_was_made() -> None:
    models = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)["models"]
    for name, record in models.items():
        assert record["command"] == f"assay models build {name} --seed 0 --threads 2"


def test_building_prints_the_held_out_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"llama": dataclasses.replace(RECIPES["llama"], steps=2, rows=1)}
    text = bytes(range(32, 127)) * 40
    monkeypatch.setattr("assay.models.micro.recipes.RECIPES", short)
    monkeypatch.setattr("assay.models.micro_training.standard_library_text", lambda: (text, text))
    monkeypatch.setattr("assay.models.micro_training._HELD_OUT_BYTES", 1088)
    output = tmp_path / "built"
    result = CliRunner().invoke(app, ["build", "llama", "--output", str(output), "--threads", "1"])
    assert result.stdout.startswith(f"{output}: 456,288 parameters, held-out loss ")
    assert "nats per byte" in result.stdout
    assert "step 2 of 2: training loss" in result.stderr
    assert (output / "model.safetensors").is_file()


def test_building_what_is_no_recipe_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["build", "gpt"])
    assert isinstance(result.exception, UsageError)
