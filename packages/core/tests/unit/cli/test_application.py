"""`assay report`, `assay explain` and `assay models` as commands."""

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from assay.cli import application
from assay.cli.application import explain, models_app, report
from assay.errors import MachineError, UsageError
from assay.files import UnreadableFileError
from assay.judge.wording import describe_diagnosis, load_diagnoses
from assay.models import RECIPES
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

PLACE = "model.layers.0.mlp.down_proj"
FAILED = Sample(1, 2, 18, 2, PLACE)
CLEAN = Sample(1, 2, 18, 2, None)
SIDES = "check generate of micro:llama on cpu/bfloat16 against cpu/float32"


@pytest.fixture
def report_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(report)
    return app


@pytest.fixture(autouse=True)
def inside_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sample(Path("failed"), FAILED)
    write_sample(Path("clean"), CLEAN)


def test_the_exit_code_is_that_of_the_verdict(report_app: typer.Typer) -> None:
    assert CliRunner().invoke(report_app, ["clean"]).exit_code == 0
    assert CliRunner().invoke(report_app, ["failed"]).exit_code == 1


def test_the_verdict_is_printed_first_and_the_next_command_last(report_app: typer.Typer) -> None:
    lines = CliRunner().invoke(report_app, ["failed"]).stdout.splitlines()
    assert lines[0] == "✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32"
    assert lines[-2:] == ["report: failed/report.html", "Next: assay explain module-error"]
    assert Path("failed/report.html").is_file()


def test_json_is_the_verdict_and_nothing_else(report_app: typer.Typer) -> None:
    result = CliRunner().invoke(report_app, ["failed", "--json"])
    assert json.loads(result.stdout) == json.loads(Path("failed/verdict.json").read_text())
    assert "report: failed/report.html" in result.stderr


def test_several_runs_end_like_the_worst_of_them(report_app: typer.Typer) -> None:
    result = CliRunner().invoke(report_app, ["clean", "failed", "--output", "all", "--json"])
    assert result.exit_code == 1
    assert [item["verdict"] for item in json.loads(result.stdout)] == ["PASS", "FAIL"]
    assert Path("all/index.html").is_file()


def test_several_runs_get_a_new_folder_of_their_own(report_app: typer.Typer) -> None:
    CliRunner().invoke(report_app, ["clean", "failed"])
    pages = list(Path("runs").glob("*-report/index.html"))
    assert len(pages) == 1


def test_a_job_summary_holds_every_run(report_app: typer.Typer) -> None:
    CliRunner().invoke(report_app, ["clean", "failed", "--markdown", "summary.md"])
    lines = Path("summary.md").read_text().splitlines()
    headings = [line[:27] for line in lines if line.startswith(("## ", "<details><summary>✓"))]
    assert headings == ["<details><summary>✓ PASS: c", "## ✗ FAIL: check generate o"]
    assert Path("summary.md").read_text().splitlines()[:4] == [
        "| verdict | folder | run | where | what | ratio / limit |",
        "|---|---|---|---|---|--:|",
        f"| PASS | clean | {SIDES} |  | relative error 3.67e-3 | 1.31x / 3.0x |",
        f"| FAIL | failed | {SIDES} | {PLACE} | relative error 4.09e-2 | 14.6x / 3.0x |",
    ]


def test_a_folder_without_a_run_writes_nothing(report_app: typer.Typer) -> None:
    Path("empty").mkdir()
    result = CliRunner().invoke(report_app, ["clean", "empty", "--output", "all"])
    assert isinstance(result.exception, UnreadableFileError)
    assert not Path("all").exists()


@pytest.fixture
def explain_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(explain)
    return app


def test_without_a_name_everything_that_has_an_explanation_is_listed(
    explain_app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = CliRunner().invoke(explain_app, []).stdout.splitlines()
    words = [*load_diagnoses(), "underpowered", "PASS", "FAIL", "NOT_COMPARED", "2"]
    assert [line.split()[0] for line in lines] == words


def test_a_diagnosis_is_printed_whole(
    explain_app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert (
        CliRunner().invoke(explain_app, ["clip-norm"]).stdout
        == describe_diagnosis("clip-norm") + "\n"
    )


@pytest.mark.parametrize("arguments", [[], ["clip-norm"]])
def test_no_line_of_an_explanation_ends_with_spaces(
    explain_app: typer.Typer, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(explain_app, arguments).stdout.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line != line.rstrip()] == []


def test_an_unknown_name_is_a_usage_error(explain_app: typer.Typer) -> None:
    assert isinstance(CliRunner().invoke(explain_app, ["clipnorm"]).exception, UsageError)


def test_the_list_names_every_recipe_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = CliRunner().invoke(models_app, ["list"]).stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [f"micro:{name}" for name in RECIPES]
    assert all("nats per" in line for line in lines)


def test_a_recipe_whose_weights_are_absent_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.models.micro.recipes.WEIGHTS", tmp_path)
    assert CliRunner().invoke(models_app, ["list"]).stdout.count("not installed") == len(RECIPES)
    record = json.loads(CliRunner().invoke(models_app, ["list", "--json"]).stdout)
    assert record == {"schema": 1, "models": dict.fromkeys(RECIPES)}


def test_the_list_as_json_holds_how_each_model_was_made() -> None:
    models = json.loads(CliRunner().invoke(models_app, ["list", "--json"]).stdout)["models"]
    for name, record in models.items():
        assert record["command"] == f"assay models build {name} --seed 0 --threads 2"


def test_building_prints_the_held_out_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"llama": dataclasses.replace(RECIPES["llama"], steps=2, rows=1)}
    text = bytes(range(32, 127)) * 40
    monkeypatch.setattr("assay.models.micro.recipes.RECIPES", short)
    monkeypatch.setattr("assay.models.micro_training.standard_library_text", lambda: (text, text))
    monkeypatch.setattr("assay.models.micro_training._HELD_OUT_BYTES", 1088)
    output = tmp_path / "built"
    result = CliRunner().invoke(
        models_app, ["build", "llama", "--output", str(output), "--threads", "1"]
    )
    assert result.stdout.startswith(f"{output}: 456,288 parameters, held-out loss ")
    assert "nats per byte" in result.stdout
    assert "step 2 of 2: training loss" in result.stderr
    assert (output / "model.safetensors").is_file()


def test_building_what_is_no_recipe_is_a_usage_error() -> None:
    result = CliRunner().invoke(models_app, ["build", "gpt"])
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize("name", ["expect", "smoke", "bench"])
def test_command_of_an_absent_package_names_the_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "entry_points", lambda **_: ())
    app = typer.Typer()
    app.command("inspect")(lambda: None)
    command = application.build_command.__wrapped__(app)
    with pytest.raises(MachineError) as raised:
        command([name, "verify", "--help"], standalone_mode=False)
    package = application._PACKAGES[name]
    assert str(raised.value).startswith(
        f"`assay {name}` is in {package}, which this Python does not"
    )
    assert str(raised.value).endswith(f" -m pip install {package}")
