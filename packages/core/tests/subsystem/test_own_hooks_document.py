"""docs/own-hooks.md: its script writes two dumps, and their comparison prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.documented_commands import shell_commands

PAGE = Path(__file__).parents[4] / "docs" / "own-hooks.md"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    (tmp_path / "hooks.py").write_text(blocks["python"], encoding="utf-8")
    shown = blocks["text"].splitlines()
    for program, *arguments in shell_commands(text):
        start = {"assay": ["-m", "assay.cli"], "python3": []}[program]
        done = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (program == "assay"), done.stderr
        if program == "assay":
            assert done.stdout.splitlines()[: len(shown)] == shown
