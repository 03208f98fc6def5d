"""A verdict inside of a test: a failed check is an AssertionError, and says what the faces say."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from assay.comparing.deciding_rows import find_deciding_rows
from assay.comparing.explain import explain_verdict
from assay.comparing.phrases import describe_sides
from assay.report.run_report import read_report
from assay.verdicts import Measurement, Verdict


def assert_passed(verdict: Verdict, measurements: Sequence[Measurement] = ()) -> None:
    """Raise AssertionError with the explanation unless `verdict` is a PASS.

    measurements: rows that the explanation is filled from.
    """
    __tracebackhide__ = True
    if not verdict.passed:
        raise AssertionError(_explain(verdict, measurements))


def assert_run_passed(folder: Path) -> Verdict:
    """As `assert_passed`, for the finished run in `folder`; names the command that opens its report.

    Returns: its verdict.

    Raises: UnreadableRunError if there is none.
    """
    __tracebackhide__ = True
    report = read_report(folder)
    if not report.verdict.passed:
        explanation = _explain(report.verdict, report.measurements)
        raise AssertionError(f"{explanation}\nReport: assay report {shlex.quote(str(folder))}")
    return report.verdict


def _explain(verdict: Verdict, measurements: Sequence[Measurement]) -> str:
    """The message of `verdict`, whose second line names the model and both RUNs."""
    deciding = find_deciding_rows(verdict, measurements)
    headline, *rest = explain_verdict(verdict, deciding).message.splitlines()
    return "\n".join([headline, f"  {describe_sides(verdict)}", *rest])
