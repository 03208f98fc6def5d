import pickle

import pytest
import torch.distributed as dist

from assay.errors import MachineError, UsageError
from assay.launch.errors import RankSkipped
from assay.launch.failures.rank_reports import RankReport, report_of
from assay.launch.joining import is_communication_error

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
