"""Which failure is reported first, and its message: on made-up states, without processes."""

import pytest

from assay.errors import MachineError, UsageError
from assay.launch.errors import WorldError, WorldHungError
from assay.launch.failures.causes import Directness, RankState, failure_of, hang_of, strongest
from assay.launch.failures.rank_reports import RankReport
from assay.launch.world import World

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
