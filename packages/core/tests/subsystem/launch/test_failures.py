"""Every way in which a rank can fail is reported at once, with its cause, and leaves no process.

In most of them each rank has started a child that does not end by itself; the fixture `no_orphans`
looks for these, too.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.launch import FORK_SERVER, TimeLimits, World, WorldError, WorldHungError
from packages.core.tests.subsystem.launch import bodies
from packages.core.tests.subsystem.launch.conftest import is_alive, noted

# With PATIENT no collective times out within a test; with IMPATIENT one does, before its body.
PATIENT = TimeLimits(collective_seconds=20, body_seconds=40)
IMPATIENT = TimeLimits(collective_seconds=0.5, body_seconds=20)

BODIES = str(Path(bodies.__file__))


def line_of(mark: str) -> str:
    """FILE:LINE of the line of `bodies` that ends with `# mark`."""
    lines = Path(BODIES).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{BODIES}:{number}"


def failure(fault: str, folder: Path, limits: TimeLimits = PATIENT, size: int = 2) -> WorldError:
    """The error of a world in which rank 1 does `fault` while the others wait for it."""
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        bodies.launch(bodies.fail, World({"dp": size}, limits=limits), folder, fault)
    assert time.monotonic() - started < 10
    assert len(noted(folder)) == 2 * size
    return caught.value


def test_exception_is_reported_at_once_with_its_rank_and_traceback(pids: Path) -> None:
    error = failure("raise", pids)
    assert error.ranks == (1,)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of a world of 2 ranks (dp=2) raised ValueError: boom"
    assert lines[1] == "  Traceback (most recent call last):"
    where = line_of("raises").rpartition(":")[2]
    assert f'    File "{BODIES}", line {where}, in _raise_boom' in lines
    assert "  ValueError: boom" in lines


def test_killed_rank_is_reported_before_the_errors_of_its_peers(pids: Path) -> None:
    error = failure("kill", pids, size=4)
    assert error.ranks == (1,)
    assert str(error).splitlines()[0] == (
        "rank 1 of a world of 4 ranks (dp=4) was ended by SIGKILL"
        " (the machine may have run out of memory) before its body returned"
    )


def test_cause_that_is_detected_after_its_consequence_is_reported_first(pids: Path) -> None:
    error = failure("hang-up-and-die", pids)
    assert error.ranks == (1,)
    assert "rank 1 of a world of 2 ranks (dp=2) was ended by SIGKILL" in str(error)
    assert "  rank 0 waited at " in str(error)


def test_output_of_a_killed_rank_is_reported(pids: Path) -> None:
    lines = str(failure("print-and-die", pids)).splitlines()
    assert lines[-2:] == ["  rank 1 printed last:", "    the last words"]


def test_crash_is_reported_with_its_line(pids: Path) -> None:
    lines = str(failure("abort", pids)).splitlines()
    assert lines[0].endswith("was ended by SIGABRT before its body returned")
    assert lines[1] == "  it stood at"
    assert lines[2].startswith(f"    {BODIES}:")
    assert lines[2].endswith(" in fail")


@pytest.mark.parametrize(("fault", "code"), [("exit", 0), ("exit-3", 3)])
def test_rank_that_exits_is_a_failure_whatever_its_exit_code(
    pids: Path, fault: str, code: int
) -> None:
    error = failure(fault, pids)
    assert error.ranks == (1,)
    assert str(error).splitlines()[0] == (
        f"rank 1 of a world of 2 ranks (dp=2) ended with exit code {code} before its body returned"
    )


@pytest.mark.parametrize("fault", ["sys-exit", "sys-exit-thread"])
def test_sys_exit_is_a_failure_reported_with_its_line(pids: Path, fault: str) -> None:
    error = failure(fault, pids)
    assert str(error).startswith("rank 1 of a world of 2 ranks (dp=2) raised SystemExit: 0\n")
    assert f'    File "{BODIES}", line' in str(error)


def test_rank_that_exits_while_no_rank_waits_for_it_is_a_failure(pids: Path) -> None:
    with pytest.raises(WorldError, match="ended with exit code 0 before its body returned"):
        bodies.launch(bodies.fail_alone, World({"dp": 2}), pids, "exit")


def test_crash_after_the_body_is_a_failure(pids: Path) -> None:
    with pytest.raises(WorldError) as caught:
        bodies.launch(bodies.fail_at_the_end, World({"dp": 2}), pids)
    assert "was ended by SIGABRT after its body had returned" in str(caught.value)


def test_first_of_two_exceptions_is_reported_first() -> None:
    with pytest.raises(WorldError) as caught:
        bodies.launch(bodies.raise_two, World({"dp": 2}))
    assert caught.value.ranks[0] == 1
    assert "raised ValueError: of rank 1\n" in str(caught.value)


def test_hang_in_python_names_both_ranks_and_their_lines(pids: Path) -> None:
    error = failure("sleep", pids, IMPATIENT)
    assert isinstance(error, WorldHungError)
    assert error.ranks == (1,)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of a world of 2 ranks (dp=2) hung: a collective was given up"
    assert lines[1].startswith(
        f"  rank 0 waited at {line_of('waits')} in sum_of_ranks, in all_reduce, until RuntimeError:"
        " Timed out waiting 500ms"
    )
    assert lines[2] == f"  rank 1 waited at {line_of('sleeps')} in <lambda>"


@pytest.mark.long
def test_rank_that_does_not_end_after_its_body_is_named() -> None:
    bodies.launch(
        bodies.sum_of_ranks, World({"dp": 2})
    )  # so that the limit does not include the preload
    limits = TimeLimits(start_seconds=10)
    with pytest.raises(WorldHungError) as caught:
        bodies.launch(bodies.linger, World({"dp": 2}, limits=limits))
    assert caught.value.ranks == (1,)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "rank 1 of a world of 2 ranks (dp=2) hung: not every rank had ended 10 s after its body"
    )
    assert any(line.startswith("  rank 1 returned") for line in lines)


@pytest.mark.parametrize("fault", ["loop", "loop-in-c"])
def test_rank_that_never_releases_the_interpreter_lock_is_named(pids: Path, fault: str) -> None:
    error = failure(fault, pids, IMPATIENT)
    assert isinstance(error, WorldHungError)
    marks = {"loop": "loops", "loop-in-c": "holds the interpreter"}
    assert f"  rank 1 waited at {line_of(marks[fault])} in _loop" in str(error)


def test_hang_in_a_collective_names_the_line_where_the_rank_waits(pids: Path) -> None:
    error = failure("return-early", pids, IMPATIENT)
    lines = str(error).splitlines()
    assert lines[0].startswith(
        "rank 0 of a world of 2 ranks (dp=2) raised RuntimeError: Timed out waiting 500ms"
    )
    where = line_of("waits").rpartition(":")[2]
    assert f'    File "{BODIES}", line {where}, in sum_of_ranks' in lines
    assert "  rank 1 returned" in lines


def test_collective_longer_than_the_body_limit_is_a_hang_with_the_stacks_of_all(pids: Path) -> None:
    limits = TimeLimits(collective_seconds=0.9, body_seconds=1)
    with pytest.raises(WorldHungError) as caught:
        bodies.launch(bodies.sleep_for_ever, World({"dp": 2}, limits=limits), pids)
    assert caught.value.ranks == (0, 1)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "ranks 0-1 of a world of 2 ranks (dp=2) hung: not every body had ended after 1 s"
    )
    assert lines[1].startswith(f"  ranks 0-1 waited at {BODIES}:")
    assert lines[1].endswith(" in sleep_for_ever")


def test_stopped_rank_is_killed_although_it_reports_no_stack(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.launch.calling._STACK_SECONDS", 0.3)
    error = failure("stop", pids, IMPATIENT)
    assert isinstance(error, WorldHungError)
    assert str(error).splitlines()[2] == "  rank 1 did not report where it stands"


def test_skip_of_one_rank_is_a_failure(pids: Path) -> None:
    error = failure("skip", pids)
    assert error.ranks == (1,)
    assert str(error).splitlines()[0] == (
        "rank 1 of a world of 2 ranks (dp=2) skipped (no card), but not all ranks did"
    )


def test_skip_of_one_rank_that_no_rank_waits_for_is_a_failure(pids: Path) -> None:
    with pytest.raises(WorldError, match=r"skipped \(no card\), but not all ranks did"):
        bodies.launch(bodies.fail_alone, World({"dp": 2}), pids, "skip")


def test_ten_megabytes_of_output_block_nothing_and_their_end_is_reported(pids: Path) -> None:
    error = failure("print", pids)
    assert "raised ValueError: boom" in str(error).splitlines()[0]
    assert str(error).splitlines()[-1] == "    the last line"
    assert len(str(error)) < 10_000


def test_assay_error_is_raised_with_its_message(pids: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bodies.launch(bodies.fail, World({"dp": 2}), pids, "usage")
    assert str(caught.value) == "no such model: 'x'"


def test_failure_ends_neither_the_session_nor_the_next_world(pids: Path) -> None:
    failure("kill", pids)
    assert bodies.launch(bodies.sum_of_ranks, World({"dp": 2})) == [1.0, 1.0]


@pytest.mark.long
def test_next_world_starts_after_the_fork_server_was_killed() -> None:
    bodies.launch(bodies.sum_of_ranks, World({"dp": 2}))
    assert FORK_SERVER.pid is not None
    os.kill(FORK_SERVER.pid, signal.SIGKILL)
    assert bodies.launch(bodies.sum_of_ranks, World({"dp": 2})) == [1.0, 1.0]


def test_killed_leader_is_a_failure(pids: Path) -> None:
    thread = threading.Thread(target=lambda: os.kill(leader_of(pids), signal.SIGKILL))
    thread.start()
    with pytest.raises(WorldError, match="the process that leads a group is gone"):
        bodies.launch(bodies.sleep_for_ever, World({"dp": 2}), pids)
    thread.join()


def wait_for_pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while len(found := noted(folder)) < 4:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return found


def leader_of(folder: Path) -> int:
    return os.getpgid(wait_for_pids(folder)[0])


@pytest.fixture
def default_interrupt_handler() -> Iterator[None]:
    """Handle Ctrl-C, which a background job of a shell, as CI may be one, ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt_handler")
def test_ctrl_c_ends_all_ranks(pids: Path) -> None:
    def interrupt() -> None:
        wait_for_pids(pids)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        bodies.launch(bodies.sleep_for_ever, World({"dp": 2}), pids)
    thread.join()
    assert len(noted(pids)) == 4


@pytest.mark.long
def test_killing_the_launching_process_ends_ranks_that_hold_the_interpreter(
    pids: Path, tmp_path: Path
) -> None:
    script = tmp_path / "launch.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from assay.launch import World\n"
        "from packages.core.tests.subsystem.launch import bodies\n"
        f"bodies.launch(bodies.fail, World({{'dp': 2}}), Path({str(pids)!r}), 'loop-in-c')\n"
    )
    root = Path(BODIES).parents[5]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
        "TMPDIR": str(tmp_path),
    }
    process = subprocess.Popen([sys.executable, script], env=environment)
    found = wait_for_pids(pids)
    leader = leader_of(pids)
    assert len(list(tmp_path.glob("assay-world-*"))) == 1
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in (*found, leader)) or list(tmp_path.glob("assay-world-*")):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.02)
