import os
from pathlib import Path

import pytest

from packages.runners.tests.fake_programs import PROGRAM, Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("gh", "aws"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Programs(folder)
