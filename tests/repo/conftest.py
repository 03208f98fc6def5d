"""What the repository's tests read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The packages of this checkout, also where the environment was made for another one.
sys.path[:0] = map(str, sorted(ROOT.glob("packages/*/src")))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def find_files() -> Callable[[str], list[Path]]:
    """Finds the files of the repository that match a git pathspec, new ones included."""

    def find(pattern: str) -> list[Path]:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        paths = [ROOT / name for name in sorted(filter(None, listed.split("\0")))]
        found = [path for path in paths if path.is_file()]
        assert found, f"no file matches {pattern}: nothing would be checked"
        return found

    return find
