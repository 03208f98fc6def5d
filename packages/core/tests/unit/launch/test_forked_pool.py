import os
import signal
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch

from assay.errors import MachineError, UsageError
from assay.launch.forked_pool import dump_mapped, load_mapped, map_forked


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
    with pytest.raises(ZeroDivisionError) as caught:
        list(map_forked(lambda item: 1 // item, range(4)))

    assert "test_forked_pool.py" in str(caught.value.__cause__)


def test_a_killed_process_is_named() -> None:
    def die(item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(
        MachineError, match="one of the processes that compare was killed: out of memory"
    ):
        list(map_forked(die, range(8)))


def test_no_process_is_left_when_the_results_are_not_wanted() -> None:
    results = map_forked(lambda _: os.getpid(), range(1000))
    _, pid = next(results)
    results.close()  # type: ignore[attr-defined]

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def store(value: object) -> Any:
    with TemporaryFile() as file:
        dump_mapped(value, file)
        return load_mapped(file)


def test_a_value_comes_back_as_it_was() -> None:
    tensors = [
        torch.arange(6).reshape(2, 3),
        torch.rand(3, 2).double().T,
        torch.ones(2).bfloat16(),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
    ]

    loaded = store({"name": tensors, "number": 7})

    assert loaded["number"] == 7
    for one, expected in zip(loaded["name"], tensors, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_large_tensors_take_no_anonymous_memory() -> None:
    loaded = store([torch.ones(1 << 22), torch.ones(1 << 22)])
    before = anonymous_bytes()
    assert float(loaded[0].sum() + loaded[1].sum()) == 2 << 22

    assert anonymous_bytes() - before < 4 << 20


def test_loaded_tensors_can_be_changed() -> None:
    loaded = store(torch.zeros(4))
    loaded += 1

    assert loaded.tolist() == [1, 1, 1, 1]


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as file:  # noqa: PTH123
        sizes = [int(line.split()[1]) for line in file if line.startswith("RssAnon:")]
    return sizes[0] * 1024
