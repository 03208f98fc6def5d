"""Ends of ranks: which failure is reported first, its message, and the line where a rank stands.

States, reports and stacks are made up, without processes. Stacks are as faulthandler of Python 3.11
and, with names of threads, 3.14 writes them.
"""

import pickle
import sysconfig
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from assay.errors import MachineError, UsageError
from assay.launch import RankSkipped, World, WorldError, WorldHungError
from assay.launch.failures import (
    Directness,
    ProcessError,
    RankReport,
    RankState,
    describe_place,
    failure_of,
    hang_of,
    is_communication_error,
    read_end,
    read_stack,
    report_of,
    strongest,
)

PAIR = World({"dp": 2})
FOUR = World({"dp": 2, "tp": 2})

RETURNED = RankReport("returned")
SKIPPED = RankReport("skipped", summary="no card")
RAISED = RankReport(
    "raised",
    summary="ValueError: boom",
    where="body.py:3 in train",
    traceback='Traceback (most recent call last):\n  File "body.py", line 3, in train\nValueError: boom',
)
CUT_OFF = RankReport(
    "raised",
    summary="RuntimeError: Connection closed by peer",
    where="body.py:7 in train, in all_reduce",
    traceback="RuntimeError: Connection closed by peer",
    is_communication=True,
)


def error_of(world: World, *states: RankState) -> str:
    numbered = dict(enumerate(states))
    found = strongest(numbered)
    assert found is not None
    return str(failure_of(world, numbered, found))


def test_nothing_failed_while_ranks_run_return_or_all_skip() -> None:
    assert strongest({0: RankState(), 1: RankState()}) is None
    assert strongest({0: RankState(RETURNED, exit_code=0), 1: RankState()}) is None
    assert strongest({0: RankState(SKIPPED, exit_code=0), 1: RankState(SKIPPED)}) is None


@pytest.mark.parametrize(
    ("state", "directness"),
    [
        (RankState(exit_code=-9), Directness.SIGNAL),
        (RankState(RETURNED, exit_code=-11), Directness.SIGNAL),
        (RankState(RAISED, exit_code=1), Directness.EXCEPTION),
        (RankState(exit_code=0), Directness.EXIT),
        (RankState(exit_code=3), Directness.EXIT),
        (RankState(RETURNED, exit_code=1), Directness.EXIT),
        (RankState(CUT_OFF, exit_code=1), Directness.COMMUNICATION),
    ],
)
def test_each_kind_of_failure_is_recognised(state: RankState, directness: Directness) -> None:
    assert strongest({0: RankState(RETURNED), 1: state}) == (directness, [1])


def test_killed_rank_is_reported_before_what_its_peers_raised() -> None:
    states = {
        0: RankState(CUT_OFF, order=1),
        1: RankState(RAISED, order=2),
        2: RankState(exit_code=-9, order=3),
    }
    assert strongest(states) == (Directness.SIGNAL, [2])
    assert strongest({rank: states[rank] for rank in (0, 1)}) == (Directness.EXCEPTION, [1])


def test_first_of_equal_failures_is_reported() -> None:
    states = {0: RankState(RAISED, order=2), 1: RankState(RAISED, order=1)}
    assert strongest(states) == (Directness.EXCEPTION, [1, 0])


@pytest.mark.parametrize("other", [RankState(RETURNED), RankState(CUT_OFF, exit_code=1)])
def test_skip_is_a_failure_if_another_rank_returned_or_failed(other: RankState) -> None:
    assert strongest({0: other, 1: RankState(SKIPPED, exit_code=0)}) == (Directness.SKIP, [1])


def test_skip_is_no_failure_while_the_other_ranks_run() -> None:
    assert strongest({0: RankState(), 1: RankState(SKIPPED, exit_code=0)}) is None


def test_message_of_an_exception_has_its_traceback_and_the_other_ranks() -> None:
    message = error_of(
        FOUR,
        RankState(CUT_OFF, order=2),
        RankState(RAISED, order=1, log="step 1\nstep 2\n"),
        RankState(CUT_OFF, order=3),
        RankState(RETURNED),
    )
    assert message == (
        "rank 1 of a world of 4 ranks (dp=2, tp=2) raised ValueError: boom\n"
        "  Traceback (most recent call last):\n"
        '    File "body.py", line 3, in train\n'
        "  ValueError: boom\n"
        "  ranks 0, 2 waited at body.py:7 in train, in all_reduce, until RuntimeError: Connection"
        " closed by peer\n"
        "  rank 3 returned\n"
        "  rank 1 printed last:\n"
        "    step 1\n"
        "    step 2"
    )


def test_message_of_a_killed_rank_has_its_signal_and_its_last_line() -> None:
    message = error_of(
        PAIR,
        RankState(where="body.py:9 in train"),
        RankState(exit_code=-11, where="body.py:5 in f"),
    )
    assert message == (
        "rank 1 of a world of 2 ranks (dp=2) was ended by SIGSEGV before its body returned\n"
        "  it stood at\n"
        "    body.py:5 in f\n"
        "  rank 0 waited at body.py:9 in train"
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (RankState(exit_code=0), "ended with exit code 0 before its body returned"),
        (RankState(RETURNED, exit_code=1), "ended with exit code 1 after its body had returned"),
        (RankState(SKIPPED, exit_code=0), "skipped (no card), but not all ranks did"),
    ],
)
def test_messages_of_other_failures(state: RankState, message: str) -> None:
    expected = f"rank 1 of a world of 2 ranks (dp=2) {message}\n  rank 0 returned"
    assert error_of(PAIR, RankState(RETURNED), state) == expected


@pytest.mark.parametrize(("is_usage", "kind"), [(True, UsageError), (False, MachineError)])
def test_assay_error_keeps_its_class_and_message(is_usage: bool, kind: type) -> None:
    report = RankReport("raised", words="no such model: 'x'", is_usage=is_usage)
    states = {0: RankState(report, exit_code=1)}
    error = failure_of(World({"dp": 1}), states, (Directness.EXCEPTION, [0]))
    assert str(error) == "no such model: 'x'"
    assert isinstance(error, kind)
    assert not isinstance(error, WorldError)


def test_message_of_a_hang_names_the_hung_ranks_and_where_every_rank_waited() -> None:
    states = {
        0: RankState(CUT_OFF, exit_code=1),
        1: RankState(where="body.py:12 in sleep"),
        2: RankState(where="body.py:12 in sleep"),
        3: RankState(RETURNED),
    }
    error = hang_of(FOUR, states, "not every body had ended after 3 s", [1, 2])
    assert isinstance(error, WorldHungError)
    assert error.ranks == (1, 2)
    assert str(error) == (
        "ranks 1-2 of a world of 4 ranks (dp=2, tp=2) hung: not every body had ended after 3 s\n"
        "  rank 0 waited at body.py:7 in train, in all_reduce, until RuntimeError: Connection"
        " closed by peer\n"
        "  ranks 1-2 waited at body.py:12 in sleep\n"
        "  rank 3 returned"
    )


def test_message_of_a_hang_names_ranks_without_a_stack() -> None:
    error = hang_of(
        PAIR, {0: RankState(where="body.py:1 in f"), 1: RankState()}, "too long", [0, 1]
    )
    assert "rank 1 did not report where it stands" in str(error)


GLOO = RuntimeError(
    "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs. GLHF!"
)


def report_of_raise(error: BaseException) -> RankReport:
    def body() -> None:
        raise error

    return report_of(body)


def test_report_holds_the_return_value() -> None:
    report = report_of(lambda: {"loss": 1.5})
    assert report.kind == "returned"
    assert report.value == pickle.dumps({"loss": 1.5})


def test_return_value_that_cannot_be_pickled_is_a_failure() -> None:
    report = report_of(lambda: lambda: None)
    assert report.kind == "raised"
    assert report.words.startswith("what the body returned cannot travel to the ranks: function")


def test_skip_is_not_reported_as_an_exception() -> None:
    report = report_of_raise(RankSkipped("no card"))
    assert (report.kind, report.summary) == ("skipped", "no card")


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("boom\nmore"), "ValueError: boom"),
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GLOO, "RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer"),
    ],
)
def test_every_exception_that_leaves_the_body_is_reported(
    error: BaseException, summary: str
) -> None:
    report = report_of_raise(error)
    assert (report.kind, report.summary) == ("raised", summary)


def test_traceback_begins_with_the_body() -> None:
    report = report_of_raise(ValueError("boom"))
    first, second, *_ = report.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second.startswith(f'  File "{__file__}"')
    assert report.where.startswith(f"{__file__}:")
    assert report.where.endswith(" in body")


@pytest.mark.parametrize(
    ("error", "words", "is_usage"),
    [
        (UsageError("no model"), "no model", True),
        (MachineError("no card"), "no card", False),
        (ValueError("x"), "", False),
    ],
)
def test_assay_errors_keep_their_message(error: Exception, words: str, is_usage: bool) -> None:
    report = report_of_raise(error)
    assert (report.words, report.is_usage) == (words, is_usage)


def from_cause(cause: Exception) -> Exception:
    error = ValueError("in the trainer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GLOO, True),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), True),
        (dist.DistBackendError("any words"), True),
        (from_cause(GLOO), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (from_cause(ValueError("boom")), False),
    ],
)
def test_communication_errors_are_distinguished_from_others(
    error: Exception, expected: bool
) -> None:
    assert is_communication_error(error) is expected


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


@pytest.mark.parametrize(
    ("exit_code", "last", "reason"),
    [
        (1, "ModuleNotFoundError: No module named 'vllm'",
         "cannot import what it needs: ModuleNotFoundError: No module named 'vllm' ({log})"),
        (1, "ValueError: vllm", "ended with exit code 1 and no result. Its last lines ({log}):"),
        # The import did not end it.
        (-15, "ModuleNotFoundError: No module named 'vllm'",
         "was ended by SIGTERM. Its last lines ({log}):"),
    ],
)  # fmt: skip
def test_missing_package_is_the_reason_of_the_end(
    tmp_path: Path, exit_code: int, last: str, reason: str
) -> None:
    log = tmp_path / "lm-eval.log"
    log.write_text(f"frame\n{last}\n", encoding="utf-8")
    first, *lines = str(ProcessError.died("lm-eval", exit_code, log)).splitlines()
    assert first == f"the lm-eval process {reason.format(log=log)}"
    assert [line.strip() for line in lines] == (["frame", last] if "last lines" in reason else [])


def test_only_the_last_state_of_a_progress_bar_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"begin\r\nbar 1%\rbar 50%\rbar 100%\nend")

    assert read_end(log) == ["begin", "bar 100%", "end"]


def test_a_long_line_is_read_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 2**16)

    begin = time.monotonic()

    assert read_end(log) == ["x" * 2**16]
    assert time.monotonic() - begin < 1  # 5 s, where a match begins at every character
