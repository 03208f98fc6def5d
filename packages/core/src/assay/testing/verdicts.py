"""Assertions about verdicts, which fail with the command's explanation."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from assay.judge.explain import explain_verdict, find_deciding_rows
from assay.judge.wording import describe_sides
from assay.report.run_report import read_report
from assay.verdicts import Measurement, Verdict


def assert_passed(verdict: Verdict, measurements: Sequence[Measurement] = ()) -> None:
    """Raise AssertionError with the explanation unless `verdict` is a PASS.

    measurements: rows for the numbers in the explanation.
    """
    __tracebackhide__ = True
    if not verdict.passed:
        raise AssertionError(_explain(verdict, measurements))


def assert_run_passed(folder: Path) -> Verdict:
    """Raise AssertionError unless the finished run in `folder` has passed.

    The message ends with the command that opens the run's report.
    Returns: the verdict of the run.
    Raises: UnreadableFileError if `folder` holds no finished run.
    """
    __tracebackhide__ = True
    report = read_report(folder)
    if not report.verdict.passed:
        explanation = _explain(report.verdict, report.measurements)
        raise AssertionError(f"{explanation}\nReport: assay report {shlex.quote(str(folder))}")
    return report.verdict


def _explain(verdict: Verdict, measurements: Sequence[Measurement]) -> str:
    """Format the message of `verdict`; its second line names the model and both RUNs."""
    deciding = find_deciding_rows(verdict, measurements)
    headline, *rest = explain_verdict(verdict, deciding).message.splitlines()
    return "\n".join([headline, f"  {describe_sides(verdict)}", *rest])
