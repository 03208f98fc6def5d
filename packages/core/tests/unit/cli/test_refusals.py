"""What `assay capture`, `calibrate` and `reproduce` refuse before they start a process."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from assay.cli.application import app, calibrate
from assay.cli.capture import capture
from assay.cli.reproduce import reproduce
from assay.errors import UsageError
from assay.runs.results import write_results
from assay.verdicts import Level, Location, Outcome, Verdict

KNOWN = "known: float64, float32, bfloat16, float16"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("assay.generate.check.run_clean", start)
    monkeypatch.setattr("assay.generate.check.capture", start)


def message(command: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UsageError), error
    return str(error)


@pytest.mark.parametrize(
    ("dtypes", "problem"),
    [
        ("bfloat16,flaot16", f"unknown dtype 'flaot16'; {KNOWN}"),
        ("", f"unknown dtype ''; {KNOWN}"),
        ("bfloat16,", f"unknown dtype ''; {KNOWN}"),
        ("tf32", f"unknown dtype 'tf32'; {KNOWN}"),
        ("float16, float16", "float16 is given twice"),
    ],
)
def test_dtypes_of_a_golden_are_checked_first(dtypes: str, problem: str, tmp_path: Path) -> None:
    arguments = ["micro:llama", "--run", "cpu/float32", "--output", "golden"]
    said = message(capture, *arguments, "--noise-for", dtypes)
    assert said == f"--noise-for {dtypes!r}: {problem}"
    assert not (tmp_path / "golden").exists()


def test_options_of_a_command_are_refused_for_a_model() -> None:
    arguments = ["micro:llama", "--run", "cpu/float32", "--output", "golden"]
    said = message(capture, *arguments, "--steps", "0:2", "--stats-only")
    assert said == "--steps, --stats-only: only for a command after --"
    assert message(capture, "--output", "golden").startswith("name a model and its --run, or")


def test_a_zero_is_an_option_that_was_given() -> None:
    arguments = ["micro:llama", "--run", "cpu/float32", "--output", "golden"]
    assert message(capture, *arguments, "--max-seconds", "0").startswith("--max-seconds: only for")


def test_level_op_is_refused_for_a_model() -> None:
    arguments = ["micro:llama", "--run", "cpu/float32", "--output", "golden"]
    assert message(capture, *arguments, "--level", "op").startswith(
        "--level op: only for a command"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["cpu/bfloat16", "cpu/bfloat16"], "cpu/bfloat16 is given twice"),
        (
            ["cpu/bfloat16", "--model", "micro:llama", "--model", "micro:llama"],
            "micro:llama is given twice",
        ),
        (
            ["a.jsonl", "--reference", "cpu/float32"],
            "--reference applies only to RUNs; files of measurements already have theirs",
        ),
        (["cpu/bfloat17"], f"unknown dtype 'bfloat17' in run 'cpu/bfloat17'; {KNOWN}"),
        (
            ["cpu/bfloat16", "--reference", "cpu"],
            "'cpu' is not a run; write one as DEVICE/DTYPE, such as cuda:1/bfloat16",
        ),
    ],
)
def test_runs_to_calibrate_on_are_checked_first(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    assert message(calibrate, *arguments, "--output", "x.toml") == problem
    assert not (tmp_path / "runs").exists()


def test_the_folder_of_the_limits_is_checked_first(tmp_path: Path) -> None:
    said = message(calibrate, "cpu/bfloat16", "--output", "missing/x.toml")
    assert said == "there is no folder missing to write x.toml into"
    assert not (tmp_path / "runs").exists()


def test_limits_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.toml").touch()
    assert message(calibrate, "cpu/bfloat16", "--output", "x.toml") == "x.toml exists already"


@pytest.mark.parametrize(
    ("command", "kind", "check"),
    [
        (["assay", "compare", "golden", "mine"], "compare", "generate"),
        (["assay", "smoke", "run", "cases"], "smoke", "train"),
    ],
)
def test_a_run_of_another_command_names_the_check_to_reproduce(
    command: list[str], kind: str, check: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    verdict = Verdict(verdict=Outcome.FAIL, model={"name": "folder"})
    write_results(verdict, [], run, command)
    said = message(reproduce, str(run))
    wanted = f"run `assay check {check} folder --reference cpu/float32 --candidate RUN`"
    assert said.startswith(f"{run} is of `assay {kind}`, ")
    assert wanted in said


def test_inputs_that_a_loader_hands_out_wrongly_are_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    (run / "golden").mkdir(parents=True)
    why = "micro-batch 0 of step 0 was trained 2 times"
    verdict = Verdict(
        verdict=Outcome.FAIL,
        levels={"inputs": Level(verdict=Outcome.FAIL, reason=why)},
        location=Location(phase="inputs", step=0),
    )
    command = ["assay", "check", "train", "micro:llama", "--reference", "cpu/float32"]
    write_results(verdict, [], run, [*command, "--candidate", "cpu/float32", "--mesh", "dp=2"])
    error = CliRunner().invoke(app, ["reproduce", str(run)]).exception
    assert str(error) == (
        f"{run} cannot be reproduced: {why}, and no operation of torch hands out the inputs"
    )
    assert not (run / "reproduce").exists()
