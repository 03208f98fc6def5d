import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.launch import FORK_SERVER, World
from packages.core.tests.subsystem.launch import bodies


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def worlds_of_the_fork_server() -> list[int]:
    """Processes that the fork server of this process has running."""
    server = FORK_SERVER.pid
    pids = [path.name for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [int(pid) for pid in pids if server and parent_of(pid) == server and is_alive(int(pid))]


@pytest.fixture(autouse=True, scope="session")
def warm_fork_server() -> None:
    """Start the fork server, so that its imports are not part of any test's time."""
    bodies.launch(bodies.sum_of_ranks, World({"dp": 1}))


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """Folder into which ranks write their process ids and those of their children."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


def noted(folder: Path) -> list[int]:
    return [int(pid) for note in folder.glob("*.pids") for pid in note.read_text().split()]


def wait_until_gone(pids: Path) -> None:
    # A killed process takes a moment to disappear.
    deadline = time.monotonic() + 2
    while left := [pid for pid in noted(pids) if is_alive(pid)] + worlds_of_the_fork_server():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_orphans(pids: Path) -> Iterator[None]:
    """After every test no rank, no child of a rank and no leader is left."""
    yield
    wait_until_gone(pids)
