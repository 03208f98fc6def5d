"""The help of every command, on a terminal of 80 columns."""

import re
import shlex
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import typer

from assay.api.options import Option
from assay.cli.application import app, build_command
from assay.cli.derived_commands import with_options
from assay.cli.help_text import use_plain_help


def helps(command: Any, words: str = "assay") -> Iterator[tuple[str, Any, str]]:
    context = typer.Context(command, info_name=words, terminal_width=80)
    yield words, command, command.get_help(context)
    for name, one in getattr(command, "commands", {}).items():
        yield from helps(one, f"{words} {name}")


HELPS = [*helps(build_command(app))]


def test_no_line_is_too_long_and_no_word_is_broken() -> None:
    assert len(HELPS) > 20
    for words, _, text in HELPS:
        lines = text.splitlines()
        assert not [line for line in lines if len(line) > 78], words
        assert not [line for line in lines if re.search(r"\w-$", line)], words


def test_no_type_of_python_is_shown_and_no_summary_is_cut() -> None:
    for words, _, text in HELPS:
        assert not re.search(r"<(str|int|float|path|list|Path|bool)\b", text), words
        summaries = text.partition("\nCommands:\n")[2]
        assert "..." not in summaries, words
        assert "<command>" not in text, words


def test_examples_can_be_copied() -> None:
    num_examples = 0
    for words, command, text in HELPS:
        source = " ".join((command.help or "").split())
        for shown in re.findall(r"Example: (.+?)\n\n", f"{text}\n\n", re.DOTALL):
            assert " ".join(shown.replace("\\\n", " ").split()) in source, words
            assert shlex.split(shown)[0] in ("assay", "nox")
            num_examples += 1
    assert num_examples > 15


@pytest.fixture
def sample() -> Any:
    sample = typer.Typer(rich_markup_mode=None, add_completion=False)

    @sample.command("run")
    @with_options
    def run(
        folders: Annotated[list[str], Option("Folders.", "DIR...")],
        name: Annotated[str | None, Option("A name.")] = None,
        *,
        number: Annotated[int, Option("A number.", minimum=1)] = 3,
        share: Annotated[float | None, Option("A share.")] = None,
        a_very_long_name_of_an_option: Annotated[str, Option("Long.", "FILE.py:FUNC")] = "",
    ) -> None:
        """Say in one sentence that is longer than a line what this command is for, uncut.

        Example: assay run some-folder --number 12345678 --share 0.123456789 --a-very-long-name x
        """

    @sample.command("other")
    def other() -> None:
        """Do something else."""

    command: Any = typer.main.get_command(sample)
    use_plain_help(command)
    return command


def test_help_of_a_command_is_whole(sample: Any) -> None:
    (_, (_, _, text), _) = helps(sample, "assay")
    assert text == (
        "Usage: assay run [OPTIONS] DIR... [NAME]\n"
        "\n"
        "  Say in one sentence that is longer than a line what this command is for,\n"
        "  uncut.\n"
        "\n"
        "  Example: assay run some-folder --number 12345678 --share 0.123456789 \\\n"
        "    --a-very-long-name x\n"
        "\n"
        "Arguments:\n"
        "  DIR...  Folders.  [required]\n"
        "  NAME    A name.\n"
        "\n"
        "Options:\n"
        "  --number N                      A number.  [default: 3; x>=1]\n"
        "  --share X                       A share.\n"
        "  --a-very-long-name-of-an-option FILE.py:FUNC\n"
        "                                  Long.\n"
        "  --help                          Show this message and exit."
    )


def test_a_wrong_command_line_shows_the_same_usage(
    sample: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample(["run", "--nope"], prog_name="assay")
    assert capsys.readouterr().err.startswith("Usage: assay run [OPTIONS] DIR... [NAME]\n")


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("--numbr", "; did you mean --number?"),
        ("--very-long-name", "; did you mean --a-very-long-name-of-an-option?"),
        ("--step", ""),  # typer proposes --help
        ("--name", "; NAME is an argument: write its value without --name"),
        ("-x", ""),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_one(
    sample: Any, given: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample(["run", "folder", given, "3"], prog_name="assay")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"Error: No such option: {given}{suggested}"


def test_an_option_of_one_value_that_is_given_twice_is_refused(
    sample: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample(["run", "folder", "name", "--number", "1", "--share", "1", "--number", "1"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "Error: --number is given 2 times, and takes one value"


def test_flags_and_repeatable_options_may_be_given_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sample, calls = typer.Typer(rich_markup_mode=None), []

    @sample.command()
    def run(
        task: Annotated[list[str], typer.Option()],
        as_json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        calls.append((task, as_json))

    command: Any = typer.main.get_command(sample)
    use_plain_help(command)
    with pytest.raises(SystemExit, match="0"):
        command(["--task", "a", "--json", "--task", "b", "--json"])
    assert calls == [(["a", "b"], True)], capsys.readouterr().err


def test_a_wrong_value_is_described_without_words_of_a_library(
    sample: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample(["run", "folder", "--number", "0"], prog_name="assay")
    last = capsys.readouterr().err.splitlines()[-1]
    # Older versions of typer name the range: x>=1.
    assert last.startswith("Error: Invalid value for '--number': ")
    assert "Input should" not in last


def test_a_group_lists_whole_summaries(sample: Any) -> None:
    (_, _, text), *_ = helps(sample, "assay")
    assert text.endswith(
        "Commands:\n"
        "  run    Say in one sentence that is longer than a line what this command is\n"
        "         for, uncut.\n"
        "  other  Do something else."
    )
