"""`assay explain` as a command."""

import pytest
import typer
from typer.testing import CliRunner

from assay.cli.commands.results import explain
from assay.comparing.wording import describe_diagnosis, load_diagnoses
from assay.errors import UsageError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(explain)
    return app


def test_without_a_name_every_diagnosis_is_listed(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(load_diagnoses())


def test_a_diagnosis_is_printed_whole(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert CliRunner().invoke(app, ["clip-norm"]).stdout == describe_diagnosis("clip-norm") + "\n"


def test_an_unknown_name_is_a_usage_error(app: typer.Typer) -> None:
    assert isinstance(CliRunner().invoke(app, ["clipnorm"]).exception, UsageError)
