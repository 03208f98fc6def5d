import os
from collections.abc import Iterator

import pytest

from assay.errors import AssayError, MachineError, UsageError
from assay_bench.performance.requests import SuiteEvent, SuiteRequest, TurnClient


class Giver:
    """The other end of both pipes."""

    def __init__(self) -> None:
        self.child_go, self.go = os.pipe()
        self.events, self.child_events = os.pipe()
        self.turns = TurnClient(SuiteRequest(go=self.child_go, events=self.child_events))

    def event(self) -> SuiteEvent:
        return SuiteEvent.model_validate_json(os.read(self.events, 1 << 16))


@pytest.fixture
def giver() -> Iterator[Giver]:
    giver = Giver()
    yield giver
    for descriptor in (giver.child_go, giver.events, giver.child_events):
        os.close(descriptor)


def test_turn_is_requested_and_awaited(giver: Giver) -> None:
    os.write(giver.go, b"g")
    giver.turns.wait("decode")
    assert giver.event() == SuiteEvent(kind="ready", suite="decode")
    os.close(giver.go)


def test_closed_pipe_is_an_error(giver: Giver) -> None:
    os.close(giver.go)
    with pytest.raises(EOFError):
        giver.turns.wait("decode")


def test_skipped_suite_is_reported_with_its_reason(giver: Giver) -> None:
    giver.turns.skip("collectives", "needs 2 devices")
    expected = SuiteEvent(kind="skipped", suite="collectives", reason="needs 2 devices")
    assert giver.event() == expected
    os.close(giver.go)


@pytest.mark.parametrize(
    ("error", "kind"), [(UsageError("x"), "usage"), (MachineError("x"), "machine")]
)
def test_error_is_reported_with_its_kind(giver: Giver, error: AssayError, kind: str) -> None:
    giver.turns.report_error(error)
    assert (giver.event().kind, kind) == (kind, kind)
    os.close(giver.go)


def test_without_pipes_there_is_no_wait() -> None:
    turns = TurnClient(SuiteRequest())
    turns.wait("decode")
    turns.skip("decode", "no reason")
    assert SuiteRequest().go is None
