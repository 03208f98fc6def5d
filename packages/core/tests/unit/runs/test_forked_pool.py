import os
import signal
from collections.abc import Iterator

import pytest
import torch

from assay.errors import MachineError, UsageError
from assay.runs import forked_pool
from assay.runs.forked_pool import map_forked


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_item_is_done_once_in_other_processes() -> None:
    results = dict(map_forked(lambda item: (item * item, os.getpid()), range(100)))

    assert {number: square for number, (square, _) in results.items()} == {
        number: number**2 for number in range(100)
    }
    assert os.getpid() not in {pid for _, pid in results.values()}


def test_tensors_come_back_as_they_were() -> None:
    made = [torch.arange(6).reshape(2, 3), torch.rand(3, 2).double().T, torch.ones(2).bfloat16()]
    results = dict(map_forked(lambda number: made[number], range(3)))

    assert all(torch.equal(results[number], made[number]) for number in range(3))
    assert [results[number].dtype for number in range(3)] == [one.dtype for one in made]


def test_one_thread_needs_no_other_process() -> None:
    torch.set_num_threads(1)

    assert {pid for _, pid in map_forked(lambda _: os.getpid(), range(4))} == {os.getpid()}


def test_fewer_items_than_threads_leave_the_threads_to_each_item() -> None:
    assert list(map_forked(lambda _: torch.get_num_threads(), [0])) == [(0, 2)]


def test_an_error_is_raised_here() -> None:
    def fail(item: int) -> None:
        raise UsageError(f"item {item} is wrong")

    with pytest.raises(UsageError, match=r"item \d is wrong"):
        list(map_forked(fail, range(4)))


def test_another_exception_comes_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(map_forked(lambda item: 1 // item, range(4)))


def test_a_killed_process_is_named() -> None:
    def die(item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(MachineError, match=r"process \d+.*by signal 9: out of memory"):
        list(map_forked(die, range(8)))


def test_no_process_is_left_when_the_results_are_not_wanted() -> None:
    results = map_forked(lambda _: os.getpid(), range(1000))
    _, pid = next(results)
    results.close()  # type: ignore[attr-defined]

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_more_items_than_a_pipe_holds_are_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_pool, "_MOST_ITEMS", 3)

    assert {pid for _, pid in map_forked(lambda _: os.getpid(), range(4))} == {os.getpid()}
