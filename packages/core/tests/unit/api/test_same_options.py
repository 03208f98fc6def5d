"""Functions and commands have the same options, and a call says which command it is."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from assay.api.command_line import command_line
from assay.api.generation import check_generate
from assay.api.loading import check_load
from assay.api.training import check_train
from assay.cli.application import app
from assay.errors import UsageError

CHECKS: dict[str, Callable[..., object]] = {
    "generate": check_generate, "load": check_load, "train": check_train,
}  # fmt: skip


def options_of_command(name: str) -> dict[str, Any]:
    application: Any = typer.main.get_command(app)
    command = application.commands["check"].commands[name]
    context = click.Context(command)
    return {
        option.name: inspect.Parameter.empty if option.required else option.get_default(context)
        for option in command.params
        if option.name not in ("as_json", "help")
    }


@pytest.mark.parametrize("name", CHECKS)
def test_function_and_command_have_the_same_options_and_defaults(name: str) -> None:
    parameters = inspect.signature(CHECKS[name]).parameters
    of_function = {key: value.default for key, value in parameters.items()}
    # There is no live model on a command line.
    assert of_function.pop("candidate_model", None) is None
    assert of_function == options_of_command(name)


def test_a_command_holds_what_differs_from_the_defaults() -> None:
    arguments = {
        "model": "micro:llama",
        "candidate": "sim/bfloat16",
        "reference": "cpu/float32",
        "candidate_option": {"threads": "1", "batch-size": "1"},
        "max_new_tokens": 4,
        "chat": True,
        "trust_remote_code": False,
        "level": "auto",
        "output": "mine",
    }
    assert command_line(check_generate, arguments) == (
        "assay", "check", "generate", "micro:llama", "--candidate", "sim/bfloat16",
        "--reference", "cpu/float32", "--candidate-option", "threads=1",
        "--candidate-option", "batch-size=1", "--max-new-tokens", "4", "--chat",
    )  # fmt: skip


RUNS = {"reference": "cpu/float32", "candidate": "cpu/bfloat16"}


@pytest.mark.parametrize(
    ("check", "options", "message"),
    [
        (check_generate, {"candidate": "cpu/bfloat16"}, "give either --reference RUN or --golden"),
        (check_generate, RUNS | {"batch_size": 0}, "--batch-size 0: Input should be greater than"),
        (check_generate, RUNS | {"max_new_tokens": "no"}, "--max-new-tokens no: Input should be a"),
        (check_generate, RUNS | {"temperature": -1.0}, "--temperature -1.0: must be a number of"),
        (check_generate, RUNS | {"top_p": 1.5}, "--top-p 1.5: must be .* at least 0 and at most 1"),
        (check_generate, RUNS | {"top_k": 0}, "--top-k 0: must be a number of at least 1"),
        (check_generate, RUNS | {"candidate_setup": print, "candidate_model": print}, "either"),
        (check_train, RUNS | {"track": "wandb"}, "--track without --overfit"),
        (check_train, RUNS | {"mesh": "dp=2", "world": 4}, "--world 4: the mesh dp=2 has 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., object],
    options: Mapping[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        check("micro:llama", **options)
    assert list(tmp_path.iterdir()) == []
