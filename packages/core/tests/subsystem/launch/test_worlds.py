"""Worlds in which no rank fails."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from assay.errors import MachineError, UsageError
from assay.launch import (
    FORK_SERVER,
    ForkServerError,
    TimeLimits,
    World,
    WorldSkipped,
    calling,
)
from packages.core.tests.subsystem.launch import bodies
from packages.core.tests.subsystem.launch.conftest import (
    noted,
    wait_until_gone,
    worlds_of_the_fork_server,
)

PAIR = World({"dp": 2})


def test_world_returns_the_value_of_every_rank() -> None:
    # Twice the sum of 0, 1 and 2.
    assert bodies.launch(bodies.sum_of_ranks, World({"dp": 3}), 2.0) == [6.0, 6.0, 6.0]


def test_rank_has_its_number_mesh_and_environment() -> None:
    places = bodies.launch(bodies.place, World({"dp": 2, "tp": 2}))
    assert [place["number"] for place in places] == [
        (0, 0, "0", "0"),
        (1, 1, "1", "1"),
        (2, 2, "2", "2"),
        (3, 3, "3", "3"),
    ]
    assert {str(place["size"]) for place in places} == {"(4, 4, '4')"}
    # The last axis is the innermost: ranks 0 and 1 share a tp group, 0 and 2 a dp group.
    assert [place["mesh"] for place in places] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]
    assert [place["sums"] for place in places] == [
        {"dp": 0 + 2, "tp": 0 + 1},
        {"dp": 1 + 3, "tp": 0 + 1},
        {"dp": 0 + 2, "tp": 2 + 3},
        {"dp": 1 + 3, "tp": 2 + 3},
    ]
    assert {(place["device"], place["backend"], place["threads"]) for place in places} == {
        ("cpu", "gloo", 1)
    }


def test_tensors_are_sharded_over_the_mesh() -> None:
    assert bodies.launch(bodies.sharded_sum, World({"dp": 1, "tp": 2})) == [28.0, 28.0]


def test_simulated_device_is_shared_by_all_ranks() -> None:
    places = bodies.launch(bodies.place, World({"dp": 2}, device="sim", threads=2))
    assert [(place["device"], place["threads"]) for place in places] == [("sim", 2), ("sim", 2)]


def test_absent_device_raises_the_error_of_opening_it() -> None:
    with pytest.raises(MachineError, match=r"^device 'npu:[01]' is absent; missing: "):
        bodies.launch(bodies.place, World({"dp": 2}, device="npu"))


def test_rank_inherits_environment_folder_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_TEST_VARIABLE", "set")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for found in bodies.launch(bodies.surroundings, PAIR):
        assert (found["variable"], found["folder"]) == ("set", str(tmp_path))
        assert found["path"] == sys.path
        assert found["input"] == ""


def test_ranks_are_fresh_processes_of_one_group_and_touch_no_device() -> None:
    first, second = bodies.launch(bodies.surroundings, PAIR)
    assert len({os.getpid(), first["pid"], second["pid"]}) == 3
    assert first["group"] == second["group"] != os.getpgrp()
    assert first["devices"] is second["devices"] is False


def test_global_state_changed_in_one_world_is_unchanged_in_the_next() -> None:
    assert bodies.launch(bodies.change_global_state, PAIR) == [(None, None)] * 2
    assert bodies.launch(bodies.change_global_state, PAIR) == [(None, None)] * 2


def test_ranks_do_not_share_the_random_numbers_of_their_fork_server() -> None:
    drawn = [*bodies.launch(bodies.draw, PAIR), *bodies.launch(bodies.draw, PAIR)]
    assert len({python for python, _ in drawn}) == 4
    assert len({numpy for _, numpy in drawn}) == 4


def test_preloaded_module_is_imported_in_every_later_world() -> None:
    assert bodies.launch(bodies.show_modules, PAIR, "this") == [False, False]
    preloading = World({"dp": 2}, preload=("this",))
    assert bodies.launch(bodies.show_modules, preloading, "this") == [True, True]
    assert bodies.launch(bodies.show_modules, PAIR, "this") == [True, True]


@pytest.mark.long
def test_module_that_cannot_be_preloaded_is_an_error_and_the_next_world_runs() -> None:
    with pytest.raises(ForkServerError, match="No module named 'no_such_module'"):
        bodies.launch(bodies.sum_of_ranks, World({"dp": 2}, preload=("no_such_module",)))
    assert bodies.launch(bodies.sum_of_ranks, PAIR) == [1.0, 1.0]


def test_logs_are_kept_in_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("of an earlier run\n")
    bodies.launch(bodies.print_number, PAIR, folder=tmp_path)
    assert (tmp_path / "rank0.log").read_text() == "out of 0\nerr\n"
    assert (tmp_path / "rank1.log").read_text() == "out of 1\nerr\n"


def test_logs_of_ranks_keep_their_begin_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "LARGEST_LOG_BYTES", 40)
    bodies.launch(bodies.print_lines, World({"dp": 1}), folder=tmp_path)
    log = (tmp_path / "rank0.log").read_text()
    assert log.startswith("line 1 of 100\nline 2")
    assert log.endswith("00 of 100\n")
    assert "[assay: output is cut here]" in log
    assert len(log) < 100


def test_world_is_skipped_if_every_rank_skips(pids: Path) -> None:
    with pytest.raises(WorldSkipped) as caught:
        bodies.launch(bodies.skip_all, PAIR, pids)
    assert str(caught.value) == "no card"
    assert len(noted(pids)) == 4


def test_children_of_ranks_end_with_a_world_that_returns(pids: Path) -> None:
    bodies.launch(bodies.leave_a_child, PAIR, pids)
    assert len(noted(pids)) == 4


def test_worlds_launched_by_several_threads_do_not_interfere() -> None:
    results: dict[int, list[float]] = {}

    def launch(size: int) -> None:
        results[size] = bodies.launch(bodies.sum_of_ranks, World({"dp": size}))

    threads = [threading.Thread(target=launch, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {2: [1.0] * 2, 3: [3.0] * 3}


def test_world_within_a_world_is_refused() -> None:
    with pytest.raises(UsageError, match="a rank cannot start a world of its own"):
        bodies.launch(bodies.start_world, PAIR)


def test_idle_fork_server_has_one_thread_and_no_world(pids: Path) -> None:
    bodies.launch(bodies.sum_of_ranks, PAIR)
    assert len(list(Path(f"/proc/{FORK_SERVER.pid}/task").iterdir())) == 1
    wait_until_gone(pids)
    assert worlds_of_the_fork_server() == []


@pytest.mark.long
def test_a_script_needs_no_guard_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "my_bodies.py").write_text(
        "def number(request, progress, rank): return rank.number\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, my_bodies\n"
        "from assay.launch import World, call\n"
        "print(call(my_bodies.number, None, world=World({'dp': 2})), 'torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("[0, 1] False\n", "")


def test_world_that_ends_in_time_is_not_ended_by_its_limits() -> None:
    limits = TimeLimits(start_seconds=30, collective_seconds=10, body_seconds=20)
    assert bodies.launch(bodies.sum_of_ranks, World({"dp": 2}, limits=limits)) == [1.0, 1.0]
