"""Leftovers and memory of processes, each planted by a small program."""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from assay_smoke.machine import (
    Leftover,
    MemoryUse,
    MemoryWatch,
    ProcessTree,
    Snapshot,
    find_leftovers,
    ports_taken,
)

if TYPE_CHECKING:
    from assay.devices.base import Device

MIB = 1 << 20

# Starts `sys.argv[1]` as a process of its own, and ends once that has said that it is ready.
LEAVES_BEHIND = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
"""
READY = "print('ready', flush=True)"


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    tree = ProcessTree()
    yield tree
    assert tree.kill() == []


@pytest.fixture
def shared_memory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Replace /dev/shm by a folder that other tests do not see."""
    folder = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr("assay_smoke.machine.SHARED_MEMORY", folder)
    return folder


def run(tree: ProcessTree, child: str, temporary: Path) -> list[Leftover]:
    """Return what a program leaves that starts `child` and ends."""
    before = Snapshot.take(temporary)
    environment = os.environ | tree.environment | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", LEAVES_BEHIND, child], env=environment, start_new_session=True
    )
    tree.add_root(parent.pid)
    assert parent.wait() == 0
    return find_leftovers(before, tree, patience_seconds=0.2)


def test_a_program_that_ends_leaves_nothing(tree: ProcessTree, tmp_path: Path) -> None:
    assert run(tree, READY, tmp_path) == []


_FIRST_WORLD = """
import sys
from pathlib import Path
from assay.launch import World, call
from assay_smoke.machine import record_leftovers

found = []
with record_leftovers(Path(sys.argv[1]), found):
    call(print, None, world=World({"dp": 1}))
print(found)
"""


@pytest.mark.long
def test_what_stays_for_later_worlds_is_not_left_behind_by_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FIRST_WORLD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_process_that_stays_is_named(tree: ProcessTree, tmp_path: Path) -> None:
    (left,) = run(tree, f"{READY}; import time; time.sleep(60)", tmp_path)

    (process,) = tree.living()
    assert left.kind == "process"
    assert left.name.startswith(f"process {process.pid} (")
    assert left.name.endswith(" outlived the run")


def test_a_process_that_leaves_its_session_is_named(tree: ProcessTree, tmp_path: Path) -> None:
    (left,) = run(tree, f"import os, time; os.setsid(); {READY}; time.sleep(60)", tmp_path)

    assert left.kind == "process"


def test_a_process_without_the_mark_is_known_by_its_session(
    tree: ProcessTree, tmp_path: Path
) -> None:
    executed = "import os, sys; os.execve(sys.executable, [sys.executable, '-c', CODE], {})"
    child = executed.replace("CODE", repr(f"{READY}; import time; time.sleep(60)"))

    (left,) = run(tree, child, tmp_path)

    assert left.kind == "process"


def test_processes_of_others_are_not_killed(tree: ProcessTree, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run(tree, f"{READY}; import time; time.sleep(60)", tmp_path)
        assert tree.kill() == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_port_that_is_held_is_named(tree: ProcessTree, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = f"""
import socket, time
held = socket.create_server(("127.0.0.1", {port}))
{READY}
time.sleep(60)
"""
    process, held = run(tree, child, tmp_path)

    assert process.kind == "process"
    assert held == Leftover("port", f"127.0.0.1:{port} is held by process {tree.living()[0].pid}")
    assert ports_taken([port]) == [port]
    tree.kill()
    assert ports_taken([port]) == []


def test_shared_memory_that_is_left_is_named(
    tree: ProcessTree, tmp_path: Path, shared_memory: Path
) -> None:
    segment = shared_memory / "assay-test"
    child = f"open('{segment}', 'wb').write(bytes(4096)); {READY}"

    assert run(tree, child, tmp_path) == [Leftover("shared memory", f"{segment} (4096 bytes)")]


def test_shared_memory_that_another_run_uses_is_not_counted(
    tree: ProcessTree, tmp_path: Path, shared_memory: Path
) -> None:
    before = Snapshot.take(tmp_path)
    with (shared_memory / "assay-test-other").open("wb"):
        assert find_leftovers(before, tree) == []

    assert [left.kind for left in find_leftovers(before, tree)] == ["shared memory"]


def test_a_semaphore_of_another_run_is_not_counted(
    tree: ProcessTree, tmp_path: Path, shared_memory: Path
) -> None:
    before = Snapshot.take(tmp_path)
    # As sem_open makes one: written and mapped under a first name, then given its own.
    first, named = shared_memory / "sem.7Yq2aK", shared_memory / "sem.mp-other"
    first.write_bytes(bytes(32))
    with first.open("r+b") as file, mmap.mmap(file.fileno(), 32):
        file.close()
        named.hardlink_to(first)
        first.unlink()
        assert find_leftovers(before, tree) == []

    assert [left.name for left in find_leftovers(before, tree)] == [f"{named} (32 bytes)"]


def test_files_that_are_left_are_named(tree: ProcessTree, tmp_path: Path) -> None:
    (tmp_path / "there-before").touch()
    child = f"""
import os, pathlib, tempfile
pathlib.Path(tempfile.gettempdir(), "model.lock").touch()
pathlib.Path(tempfile.gettempdir(), "torchinductor_me").mkdir()
pathlib.Path(tempfile.gettempdir(), "torchinductor_me", "kernel.so").touch()
tempfile.mkstemp(prefix="shard-")
{READY}
"""
    left = run(tree, child, tmp_path)

    assert [one.kind for one in left] == ["lock file", "temporary file"]
    assert left[0].name == str(tmp_path / "model.lock")
    assert left[1].name.startswith(str(tmp_path / "shard-"))
    allowed = find_leftovers(
        Snapshot(tmp_path, frozenset([tmp_path / "there-before"]), frozenset()),
        tree,
        allowed=("model.lock", "shard-*"),
    )
    assert [one for one in allowed if one.kind != "shared memory"] == []


@contextmanager
def allocating(tree: ProcessTree, size: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds `size` bytes during the block."""
    code = f"held = bytearray(b'x') * {size}; {READY}; import time; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | tree.environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    tree.add_root(process.pid)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.stdout.close()


def test_the_peak_of_a_tree_is_seen_and_given_back(tree: ProcessTree) -> None:
    with MemoryWatch(tree) as watch, allocating(tree, 200 * MIB) as process:
        time.sleep(1.0)
        process.kill()
        process.wait()

    assert 200 * MIB <= watch.host.peak_bytes < 400 * MIB
    assert watch.host.start_bytes == watch.host.end_bytes == 0
    assert watch.host.is_back(0)
    assert watch.device is None


def test_memory_that_a_process_left_behind_holds_is_not_given_back(tree: ProcessTree) -> None:
    with MemoryWatch(tree) as watch, allocating(tree, 100 * MIB) as process:
        pass

    assert not watch.host.is_back(50 * MIB)
    assert watch.host.end_bytes >= 100 * MIB
    process.kill()
    process.wait()


def test_device_memory_that_is_not_given_back_is_seen(tree: ProcessTree) -> None:
    free = [1000 * MIB]
    device: Any = SimpleNamespace(torch_device="dev:0", free_memory_bytes=lambda: free[-1])
    with MemoryWatch(tree, cast("Device", device)) as watch:
        free.append(400 * MIB)
        watch._sample()  # as the thread does now and then
        free.append(700 * MIB)

    assert watch.device == MemoryUse(0, 600 * MIB, 300 * MIB)
    assert not watch.device.is_back(299 * MIB)
    assert watch.device.is_back(300 * MIB)
    assert str(watch.device) == "peak 629.1 MB, 314.6 MB not released"


def test_device_that_does_not_tell_what_is_free_is_not_measured(tree: ProcessTree) -> None:
    device: Any = SimpleNamespace(torch_device="dev:0", free_memory_bytes=lambda: 0)
    with MemoryWatch(tree, cast("Device", device)) as watch:
        pass
    assert watch.device is None
