import json
import subprocess
import sys

from assay_bench.performance.requests import SuiteEvent, SuiteRequest

CHILD = """
import os
from assay_bench.performance.requests import SuiteEvent, TurnClient
turns = TurnClient()
print("a library prints")
turns.wait("decode")
turns.send(SuiteEvent(kind="skipped", suite="capture", reason="needs 2 devices"))
"""


def run_child(turns: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD], input=turns, capture_output=True, text=True, check=False
    )


def test_a_turn_is_requested_and_awaited_and_only_events_reach_standard_output() -> None:
    done = run_child("\n")
    events = [SuiteEvent.model_validate_json(line) for line in done.stdout.splitlines()]
    assert events == [
        SuiteEvent(kind="ready", suite="decode"),
        SuiteEvent(kind="skipped", suite="capture", reason="needs 2 devices"),
    ]
    assert done.returncode == 0
    assert done.stderr == "a library prints\n"


def test_the_end_of_the_process_that_gives_turns_is_an_error() -> None:
    done = run_child("")
    assert json.loads(done.stdout)["kind"] == "ready"
    assert "EOFError: the process that gives the turns has ended" in done.stderr


def test_a_suite_waits_before_each_round_and_after_the_last() -> None:
    assert SuiteRequest(num_rounds=20).num_turns == 3 + 20 + 1
