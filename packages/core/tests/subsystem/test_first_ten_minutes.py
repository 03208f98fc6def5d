"""docs/first-ten-minutes.md, as a reader would type it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.documented_commands import shell_commands

PAGE = Path(__file__).parents[4] / "docs" / "first-ten-minutes.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_every_command_has_its_output(blocks: list[tuple[str, str]]) -> None:
    kinds = [kind for kind, _ in blocks if kind not in {"sh", "python"}]  # sh installs assay
    assert kinds == ["bash", "text"] * 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_print_what_the_page_shows(
    blocks: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "plant.py").write_text(dict(blocks)["python"], encoding="utf-8")
    typed = [f"```bash\n{text}```" for kind, text in blocks if kind == "bash"]
    shown = [text.splitlines() for kind, text in blocks if kind == "text"]
    for block, lines in zip(typed, shown, strict=True):
        ((program, *arguments),) = shell_commands(block)
        start = {"assay": ["-m", "assay.cli"], "python3": []}[program]
        ended = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        is_failure = any(line.startswith(("✗", "FAIL")) for line in lines)
        assert ended.returncode == is_failure, ended.stderr
        # In a verdict, machines differ in the numbers of the lines after the second one.
        num_same = 2 if "check" in arguments else len(lines)
        printed = [line.rstrip() for line in ended.stdout.splitlines()]
        assert printed[:num_same] == lines[:num_same]
    assert (tmp_path / "runs/planted/report.html").is_file()
