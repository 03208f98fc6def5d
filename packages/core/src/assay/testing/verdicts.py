"""A verdict inside of a test: a failed check is an AssertionError, and says what the faces say."""

from collections.abc import Sequence
from pathlib import Path

from assay.comparing.deciding_rows import find_deciding_rows
from assay.comparing.explain import explain_verdict
from assay.report.run_report import read_report
from assay.verdicts import Measurement, Verdict


def assert_passed(verdict: Verdict, measurements: Sequence[Measurement] = ()) -> None:
    """Raise AssertionError with the explanation unless `verdict` is a PASS.

    measurements: rows that the explanation is filled from.
    """
    __tracebackhide__ = True
    if not verdict.passed:
        evidence = find_deciding_rows(verdict, measurements)
        raise AssertionError(explain_verdict(verdict, evidence).message)


def assert_run_passed(folder: Path) -> Verdict:
    """As `assert_passed`, for the finished run in `folder`. Returns: its verdict.

    Raises: UnreadableRunError if there is none.
    """
    __tracebackhide__ = True
    report = read_report(folder)
    assert_passed(report.verdict, report.measurements)
    return report.verdict
