"""`assay report` as a command."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from assay.cli.commands.results import report
from assay.files import UnreadableFileError
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

PLACE = "model.layers.0.mlp.down_proj"
FAILED = Sample(1, 2, 18, 2, PLACE)
CLEAN = Sample(1, 2, 18, 2, None)
SIDES = "micro:llama on cpu/bfloat16 against cpu/float32"


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(report)
    return app


@pytest.fixture(autouse=True)
def inside_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sample(Path("failed"), FAILED)
    write_sample(Path("clean"), CLEAN)


def test_the_exit_code_is_that_of_the_verdict(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["clean"]).exit_code == 0
    assert CliRunner().invoke(app, ["failed"]).exit_code == 1


def test_the_verdict_is_printed_first_and_the_page_last(app: typer.Typer) -> None:
    lines = CliRunner().invoke(app, ["failed"]).stdout.splitlines()
    assert lines[0] == "✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32"
    assert lines[-1] == "report: failed/report.html"
    assert Path("failed/report.html").is_file()


def test_json_is_the_verdict_and_nothing_else(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["failed", "--json"])
    assert json.loads(result.stdout) == json.loads(Path("failed/verdict.json").read_text())
    assert "report: failed/report.html" in result.stderr


def test_several_runs_end_like_the_worst_of_them(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["clean", "failed", "--output", "all", "--json"])
    assert result.exit_code == 1
    assert [item["verdict"] for item in json.loads(result.stdout)] == ["PASS", "FAIL"]
    assert Path("all/index.html").is_file()


def test_several_runs_get_a_new_folder_of_their_own(app: typer.Typer) -> None:
    CliRunner().invoke(app, ["clean", "failed"])
    pages = list(Path("runs").glob("*-report/index.html"))
    assert len(pages) == 1


def test_a_job_summary_holds_every_run(app: typer.Typer) -> None:
    CliRunner().invoke(app, ["clean", "failed", "--markdown", "summary.md"])
    headings = [
        line for line in Path("summary.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert [heading[:9] for heading in headings] == ["## ✓ PASS", "## ✗ FAIL"]
    assert Path("summary.md").read_text().splitlines()[:4] == [
        "| verdict | folder | run | where | what | ratio / limit |",
        "|---|---|---|---|---|--:|",
        f"| PASS | clean | {SIDES} |  | relative error 3.67e-3 | 1.31x / 3.0x |",
        f"| FAIL | failed | {SIDES} | {PLACE} | relative error 4.09e-2 | 14.6x / 3.0x |",
    ]


def test_a_folder_without_a_run_writes_nothing(app: typer.Typer) -> None:
    Path("empty").mkdir()
    result = CliRunner().invoke(app, ["clean", "empty", "--output", "all"])
    assert isinstance(result.exception, UnreadableFileError)
    assert not Path("all").exists()
