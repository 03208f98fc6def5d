"""Commands derived from the signatures of functions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from assay.api.options import Option
from assay.cli.derived_commands import (
    read_values,
    with_options,
    with_options_of,
)
from assay.cli.help_text import use_plain_help
from assay.errors import UsageError

CALLS: list[dict[str, Any]] = []


def check(  # noqa: PLR0913 - one for each kind of option
    model: Annotated[str, Option("A model.", "MODEL")],
    *,
    device: Annotated[str, Option("A device.")],
    setup: Annotated["str | Unimportable | None", Option("A function.")] = None,  # type: ignore[name-defined]  # noqa: F821
    live: object = None,
    file: Annotated[str | Path | None, Option("A file.", "FILE")] = None,
    option: Annotated[Mapping[str, str | int] | None, Option("By name.")] = None,
    name: Annotated[Sequence[str], Option("Names.", "GLOB")] = (),
    level: Annotated[Literal["low", "high"], Option("How deep.")] = "low",
    dry_run: Annotated[bool, Option("Do nothing.")] = False,
    seed: Annotated[int, Option("Random numbers.")] = 0,
) -> None:
    CALLS.append({key: value for key, value in locals().items() if key != "live"})


@with_options_of(check)
def command(**given: Any) -> None:
    check(**read_values(check, given))


def run(*words: str) -> Any:
    CALLS.clear()
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return CliRunner().invoke(app, words)


DEFAULTS = {
    "model": "m", "device": "cpu", "setup": None, "file": None, "option": None,
    "name": (), "level": "low", "dry_run": False, "seed": 0,
}  # fmt: skip


def test_options_that_are_left_out_keep_their_defaults() -> None:
    assert run("m", "--device", "cpu").exit_code == 0
    assert CALLS == [DEFAULTS]


def test_every_kind_of_option_arrives_in_its_type() -> None:
    words = "--setup f.py:g --file x --option a=1 --option b=c=d --name p --name q --level high --dry-run --seed 3"
    done = run("m", "--device", "cpu", *words.split())
    assert done.exit_code == 0, done.output
    assert CALLS == [
        DEFAULTS | {
            "setup": "f.py:g", "file": "x", "option": {"a": "1", "b": "c=d"}, "name": ["p", "q"],
            "level": "high", "dry_run": True, "seed": 3,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words", ["m", "--device cpu", "m --device cpu --live x", "m --device cpu --level x"]
)
def test_what_the_function_does_not_take_is_refused(words: str) -> None:
    assert run(*words.split()).exit_code == 2
    assert not CALLS


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        (["a"], "option 'a' is not of the form NAME=VALUE"),
        (["a=1", "a=2"], "option a is given twice"),
    ],
)
def test_an_item_without_a_value_or_with_two_is_refused(items: list[str], problem: str) -> None:
    words = [word for item in items for word in ("--option", item)]
    error = run("m", "--device", "cpu", *words).exception
    assert isinstance(error, UsageError)
    assert str(error) == problem


def test_help_names_files_and_repeatable_options() -> None:
    text = run("--help").output
    assert "--name GLOB" in text
    assert "Names; repeatable." in text
    assert "--live" not in text


@with_options
def by_hand(
    file: Annotated[Path, Option("A file.", "FILE")],
    *,
    count: Annotated[int | None, Option("Some.", "N", minimum=1, variable="TEST_COUNT")] = None,
    only: Annotated[list[str] | None, Option("Names.")] = None,
    as_json: Annotated[bool, Option("Print JSON.")] = False,
) -> None:
    CALLS.append(locals().copy())


@pytest.mark.parametrize(
    ("words", "variables", "given"),
    [
        ("x", {}, {"count": None, "only": None, "as_json": False}),
        (
            "x --count 2 --only a --only b --json",
            {},
            {"count": 2, "only": ["a", "b"], "as_json": True},
        ),
        ("x", {"TEST_COUNT": "3"}, {"count": 3, "only": None, "as_json": False}),
        ("x --count 0", {}, None),
        ("x --no-json", {}, None),
        ("", {}, None),
    ],
)
def test_a_command_written_by_hand_is_read_by_typer(
    words: str, variables: dict[str, str], given: dict[str, Any] | None
) -> None:
    CALLS.clear()
    app = typer.Typer(rich_markup_mode=None)
    app.command()(by_hand)
    done = CliRunner().invoke(app, words.split(), env=variables)
    assert done.exit_code == (2 if given is None else 0), done.output
    expected = [] if given is None else [{"file": Path("x"), **given}]
    assert expected == CALLS


def test_help_lists_each_option_once_under_its_heading() -> None:
    grouped = typer.Typer(rich_markup_mode=None, add_completion=False)

    @grouped.command()
    @with_options
    def run(
        model: Annotated[str, Option("The model.", "MODEL")],
        *,
        first: Annotated[int, Option("Comes first.", "N")] = 1,
        second: Annotated[int, Option("Begins a part.", "N", group="Inputs")] = 2,
        third: Annotated[int, Option("Stays in it.", "N")] = 3,
        fourth: Annotated[int, Option("Ends the part.", "N", group="Options")] = 4,
    ) -> None:
        """Run."""

    command: Any = typer.main.get_command(grouped)
    use_plain_help(command)
    printed = command.get_help(typer.Context(command, info_name="run", terminal_width=80))
    sections = [block.split("\n") for block in printed.strip().split("\n\n")[2:]]
    assert [block[0] for block in sections] == ["Arguments:", "Options:", "Inputs:"]
    listed = [[line.split()[0] for line in block[1:]] for block in sections]
    assert listed == [["MODEL"], ["--first", "--fourth", "--help"], ["--second", "--third"]]
