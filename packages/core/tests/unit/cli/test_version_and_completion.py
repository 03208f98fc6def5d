"""`assay --version`, and what shells ask for."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def run_assay(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "assay.cli", *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    assert "| torch" not in done.stderr
    return done.stdout


def test_version_is_that_of_the_distribution() -> None:
    assert run_assay("--version") == f"assay {version('assay-core')}\n"


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("assay check g", ["generate"]),
        ("assay check generate --level ", ["auto", "tokens", "logits", "modules"]),
        ("assay check train --mixed", ["--mixed-precision"]),
    ],
)
def test_the_shell_completes_commands_options_and_values(
    words: str, completions: list[str]
) -> None:
    shown = run_assay(
        _ASSAY_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
    )
    assert shown.split() == completions


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    said = run_assay("--install-completion", "bash", HOME=str(tmp_path))
    assert said.startswith("bash completion installed in ")
    (script,) = tmp_path.glob(".bash_completions/*.sh")
    assert "_ASSAY_COMPLETE=complete_bash" in script.read_text()
