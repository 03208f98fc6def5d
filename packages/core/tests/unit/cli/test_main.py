"""Exit codes of the command line where a command ends otherwise than by a verdict."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

import assay.cli
from assay.cli import application
from assay.errors import MachineError
from assay.runs import RunFolder
from assay.runs import folders as run_folders

Run = Callable[..., int]

MODULES = {
    "healthy": """
import typer
app = typer.Typer(help="Says hello.")
@app.callback()
def group() -> None: ...
@app.command()
def hello() -> None:
    print("hello")
""",
    "absent": "import no_such_module",
    "exits": "raise SystemExit(0)",
    "untyped": """
import typer
app = typer.Typer()
@app.command()
def run(where: list[list[int]]) -> None: ...
""",
    "no_app": "app = 3",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `assay` with commands of other packages, only one of which is healthy."""
    monkeypatch.setattr(run_folders, "_begun", [])
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    monkeypatch.setattr(application, "app", app)
    for name, text in MODULES.items():
        (tmp_path / f"extension_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = [EntryPoint(name, f"extension_{name}:app", "assay.commands") for name in MODULES]
    monkeypatch.setattr(application, "entry_points", lambda group: found)

    @app.command()
    def end(how: str, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        errors = {
            "bug": ZeroDivisionError("by none"),
            "machine": MachineError("no room"),
            "pipe": BrokenPipeError(32, "Broken pipe"),
            "disk": OSError(28, "No space left on device"),
            "file": PermissionError(13, "Permission denied", "/models/config.json"),
            "interrupt": KeyboardInterrupt(),
        }
        if how == "import":
            importlib.import_module("slow_module")
            time.sleep(10)
        if how.startswith("load "):
            importlib.import_module(how.removeprefix("load "))
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        raise errors.get(how) or typer.Exit(int(how))

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["assay", *arguments])
        with pytest.raises(SystemExit) as end:
            assay.cli.main()
        assert isinstance(end.value.code, int)
        return end.value.code

    return run


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_verdict_keeps_its_code(run: Run, code: int) -> None:
    assert run("end", str(code)) == code


@pytest.mark.parametrize(
    ("how", "code"), [("machine", 2), ("bug", 2), ("disk", 2), ("pipe", 2), ("interrupt", 130)]
)
def test_what_is_no_verdict_does_not_end_with_1(run: Run, how: str, code: int) -> None:
    assert run("end", how) == code


@pytest.mark.parametrize(
    ("module", "requirement"),
    [
        ("xxhash", "xxhash>=3.4"), ("lm_eval", "lm-eval>=0.4.13"), ("yaml", "pyyaml>=6"),
        ("ruamel", "ruamel-yaml>=0.18"), ("deepspeed", "deepspeed>=0.19"), ("numpyy", ""),
        ("transformers.models.gone", ""),
    ],
)  # fmt: skip
def test_a_missing_requirement_is_named_with_its_installation(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    module: str, requirement: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    assert run("end", f"load {module}") == 2
    shown = capsys.readouterr().err
    message = f"assay: assay needs {module}, which this Python does not have; install it: "
    assert shown.startswith(message) is bool(requirement)
    assert shown.endswith(
        f"{sys.executable} -m pip install '{requirement}'\n" if requirement else "lines above\n"
    )


def test_all_missing_requirements_of_a_package_are_named_together(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(**named: str) -> list[SimpleNamespace]:
        requires = ["lm-eval>=0.4.13", "numpy>=1.26", "scipy>=1.11", "trl>=1; extra == 'trl'"]
        bench = SimpleNamespace(name="assay-bench", requires=requires)
        return [bench] if not named or named["name"] == "numpy" else []

    monkeypatch.setattr("assay.cli.ending.distributions", find)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert run("end", "load scipy") == 2
    assert capsys.readouterr().err == (
        "assay: assay needs scipy and lm-eval, which this Python does not have; install them: "
        f"{sys.executable} -m pip install 'scipy>=1.11' 'lm-eval>=0.4.13'\n"
    )


def test_a_bug_shows_its_traceback_and_says_what_it_is(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("end", "bug")
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "ZeroDivisionError: by none",
        "assay: this is a bug in assay, and no verdict: please report it with the lines above",
    ]


def test_help_lists_commands_that_cannot_be_loaded(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "healthy Says hello.",
        "absent Cannot be loaded: ModuleNotFoundError.",
        "exits Cannot be loaded: SystemExit.",
        "untyped Cannot be loaded: AssertionError.",
        "no_app Cannot be loaded: TypeError.",
    ):
        assert line in shown


def test_a_healthy_command_runs_beside_broken_ones(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("healthy", "hello") == 0
    assert capsys.readouterr().out == "hello\n"


def test_a_second_command_of_a_process_adds_nothing_again(run: Run) -> None:
    assert (run("healthy", "hello"), run("healthy", "hello")) == (0, 0)
    assert [group.name for group in application.app.registered_groups] == ["healthy"]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("run", "--fast", "x")])
def test_a_command_that_cannot_be_loaded_says_why(
    run: Run, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("absent", *arguments) == 2
    assert capsys.readouterr().err == (
        "assay: the command absent cannot be loaded: extension_absent:app raised"
        " ModuleNotFoundError: No module named 'no_such_module'; repair or uninstall its package\n"
    )


def json_of(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], str]:
    shown = capsys.readouterr()
    return json.loads(shown.out)["error"], shown.err


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("machine", "machine", "no room"),
        ("file", "machine", "/models/config.json: Permission denied"),
        ("interrupt", "interrupted", "interrupted"),
        ("terminate", "interrupted", "ended by SIGTERM"),
        ("bug", "bug", "this is a bug in assay, and no verdict"),
    ],
)
def test_error_is_json_where_json_was_asked_for(
    run: Run, capsys: pytest.CaptureFixture[str], how: str, kind: str, message: str
) -> None:
    run("end", how, "--json")
    error, shown = json_of(capsys)
    assert error["kind"] == kind
    assert error["message"].startswith(message)
    assert f"assay: {message}" in shown


def test_wrong_option_is_json_where_json_was_asked_for(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("end", "0", "--json", "--no-such-option") == 2
    error, shown = json_of(capsys)
    assert error["kind"] == "usage"
    assert "--no-such-option" in error["message"]
    assert "--no-such-option" in shown


@pytest.mark.parametrize(("how", "code"), [("interrupt", 130), ("terminate", 143)])
def test_interrupted_command_names_the_folder_of_its_run(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str, code: int
) -> None:
    folder = RunFolder.create("check generate", tmp_path / "run").path
    assert run("end", how) == code
    assert capsys.readouterr().err.endswith(f"; files so far in {folder}\n")


def test_ctrl_c_during_an_import_waits_for_its_end(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\n"
        "print('imported')\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # CI may ignore it
    try:
        assert run("end", "import") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("imported\n", "assay: interrupted\n")
