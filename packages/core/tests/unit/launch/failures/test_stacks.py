"""Stacks as faulthandler writes them, of Python 3.11 and, with names of threads, 3.14."""

import sysconfig

import pytest

from assay.launch.failures.stacks import read_stack, say_where

TORCH = f"{sysconfig.get_path('purelib')}/torch/distributed"

DUMP = f"""\
0x00007f0000000001
Thread 0x00007f0000000002 (most recent call first):
  File "/other.py", line 1 in watch

Current thread 0x00007f0000000001 (most recent call first):
  File "{TORCH}/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/c10d_logger.py", line 83 in wrapper
  File "/tests/test_x.py", line 7 in test_sum
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_stack_is_that_of_the_main_thread() -> None:
    frames = read_stack(DUMP)
    assert [(frame.line, frame.function) for frame in frames] == [
        ("3252", "all_reduce"),
        ("83", "wrapper"),
        ("7", "test_sum"),
        ("198", "_run_module_as_main"),
    ]


def test_names_of_threads_do_not_hide_it() -> None:
    named = DUMP.replace("(most recent", "[python] (most recent")
    assert read_stack(named) == read_stack(DUMP)


def test_of_several_dumps_the_last_counts() -> None:
    _, _, first = DUMP.partition("\n")
    assert read_stack(DUMP + first.replace("line 7", "line 9"))[2].line == "9"


def test_the_place_is_the_bodys_own_line_and_what_it_called() -> None:
    assert say_where(read_stack(DUMP)) == "/tests/test_x.py:7 in test_sum, in all_reduce"


def test_a_body_that_stands_in_its_own_line_called_nothing() -> None:
    dump = '0x01\nCurrent thread 0x01 (most recent call first):\n  File "/a.py", line 2 in f\n'
    assert say_where(read_stack(dump)) == "/a.py:2 in f"


def test_a_stack_of_libraries_alone_names_its_innermost_line() -> None:
    dump = f'0x01\nThread 0x01 (most recent call first):\n  File "{TORCH}/x.py", line 2 in f\n'
    assert say_where(read_stack(dump)) == f"{TORCH}/x.py:2 in f"


@pytest.mark.parametrize("text", ["", "0x01\n", "0x01\nFatal Python error: Aborted\n"])
def test_no_stack_is_no_place(text: str) -> None:
    assert say_where(read_stack(text)) == ""
