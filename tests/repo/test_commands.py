"""Every command in the documents is one that exists, and CI runs the README's."""

import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nox.registry
import pytest

from assay.cli.application import app, build_command
from tests.repo.documented_commands import shell_commands

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md")


def parse_assay(application: Any, arguments: list[str]) -> str:
    """Parse a command of assay without running it.

    Returns: the path of the command, such as "assay check generate".
    Raises: what the parser raises for arguments that do not fit.
    """
    context = application.make_context("assay", list(arguments))
    while hasattr(context.command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return str(context.command_path)


@pytest.fixture(scope="module")
def sessions() -> Mapping[str, Any]:
    importlib.import_module("noxfile")
    return nox.registry.get()


@pytest.fixture(scope="module")
def documented(root: Path) -> list[list[str]]:
    commands = [
        command
        for pattern in DOCUMENTS
        for path in sorted(root.glob(pattern))
        for command in shell_commands(path.read_text(encoding="utf-8"))
    ]
    assert ["nox", "-s", "check"] in commands
    return commands


def unknown_sessions(command: list[str], sessions: Iterable[str]) -> list[str]:
    arguments = command[: command.index("--")] if "--" in command else command
    chosen = arguments[arguments.index("-s") + 1 :] if "-s" in arguments else []
    return [name for name in chosen if name.split("(", maxsplit=1)[0] not in sessions]


def test_documents_use_known_programs_only(documented: list[list[str]]) -> None:
    programs = {command[0] for command in documented}
    assert (
        programs
        - {
            "pip",
            "nox",
            "assay",
            "git",
            "cd",
            "torchrun",
            "srun",
            "sbatch",
            "gh",
            "export",
            "python3",
            "pytest",
            ".nox/torch/bin/python",
            ".",
        }
        == set()
    )


def test_documented_sessions_exist(
    documented: list[list[str]], sessions: Mapping[str, Any]
) -> None:
    for command in documented:
        if command[0] == "nox":
            assert unknown_sessions(command, sessions) == []


def test_an_unknown_session_is_found(sessions: Mapping[str, Any]) -> None:
    (command,) = shell_commands("```bash\nnox -s lint chekc -- -s x\n```\n")
    assert unknown_sessions(command, sessions) == ["chekc"]


def test_documented_assay_commands_parse(documented: list[list[str]]) -> None:
    application = build_command(app)
    for command in documented:
        if command[0] == "assay":
            assert parse_assay(application, command[1:]).startswith("assay ")


@pytest.mark.parametrize("arguments", ["chekc generate", "check generate --no-such-option"])
def test_an_assay_command_that_does_not_parse_is_found(arguments: str) -> None:
    application = build_command(app)
    with pytest.raises(Exception, match=r"No such (command|option)"):
        parse_assay(application, arguments.split())


def test_every_session_says_what_it_does(sessions: Mapping[str, Any]) -> None:
    assert sessions
    for name, session in sessions.items():
        description = session.__doc__ or ""
        assert description.endswith("."), f"{name} has no docstring of one sentence"
        assert "\n" not in description


def test_the_sessions_that_are_promised_exist(sessions: Mapping[str, Any]) -> None:
    promised = {
        "lint", "types", "unit", "subsystem", "subsystem-long", "repo", "check", "faults", "false-alarms", "perf",
        "smoke", "expectations", "bench",
    }  # fmt: skip
    assert promised <= set(sessions)


def test_readme_begins_with_two_commands(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks[:2] == ["pip install nox && nox -s check\n", "pip install nox && nox\n"]


def test_readme_shows_real_output(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    shown = text.split("<!-- failing-output:begin")[1].split("<!-- failing-output:end")[0]
    assert "model.layers.1.mlp.down_proj" in shown


def test_ci_runs_the_second_command_of_the_readme(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    command = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1].strip()
    script = (root / ".ci/run").read_text(encoding="utf-8")
    assert command in [line.strip() for line in script.splitlines()]
    assert (root / ".ci/run").stat().st_mode & 0o111


def test_commands_are_split_as_a_shell_does() -> None:
    document = "```console\n$ a 'b c' && d \\\n  e # note\n```\n```python\nx\n```\n"
    assert list(shell_commands(document)) == [["a", "b c"], ["d", "e"]]
