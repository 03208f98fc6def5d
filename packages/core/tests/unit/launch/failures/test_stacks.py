"""Stacks as faulthandler writes them, of Python 3.11 and, with names of threads, 3.14."""

import sysconfig

import pytest

from assay.launch.failures.stacks import describe_place, read_stack

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


def test_stack_is_that_of_the_main_thread() -> None:
    frames = read_stack(DUMP)
    assert [(frame.line, frame.function) for frame in frames] == [
        ("3252", "all_reduce"),
        ("83", "wrapper"),
        ("7", "test_sum"),
        ("198", "_run_module_as_main"),
    ]


def test_stack_is_found_if_threads_have_names() -> None:
    named = DUMP.replace("(most recent", "[python] (most recent")
    assert read_stack(named) == read_stack(DUMP)


def test_last_of_several_dumps_is_read() -> None:
    _, _, first = DUMP.partition("\n")
    assert read_stack(DUMP + first.replace("line 7", "line 9"))[2].line == "9"


def test_place_is_the_line_of_the_body_and_the_function_it_called() -> None:
    assert describe_place(read_stack(DUMP)) == "/tests/test_x.py:7 in test_sum, in all_reduce"


def test_modes_around_the_body_are_not_the_place() -> None:
    mode = f"""\
  File "{TORCH}/_ops.py", line 841 in __call__
  File "/modes.py", line 61 in __torch_function__
"""
    before, marker, after = DUMP.partition(f'  File "{TORCH}/distributed_c10d.py"')
    within = read_stack(before + mode + marker + after)
    assert describe_place(within) == "/tests/test_x.py:7 in test_sum, in all_reduce"


def test_place_in_the_body_itself_names_no_called_function() -> None:
    dump = '0x01\nCurrent thread 0x01 (most recent call first):\n  File "/a.py", line 2 in f\n'
    assert describe_place(read_stack(dump)) == "/a.py:2 in f"


def test_place_in_libraries_alone_is_the_innermost_line() -> None:
    dump = f'0x01\nThread 0x01 (most recent call first):\n  File "{TORCH}/x.py", line 2 in f\n'
    assert describe_place(read_stack(dump)) == f"{TORCH}/x.py:2 in f"


@pytest.mark.parametrize("text", ["", "0x01\n", "0x01\nFatal Python error: Aborted\n"])
def test_place_without_a_stack_is_empty(text: str) -> None:
    assert describe_place(read_stack(text)) == ""
