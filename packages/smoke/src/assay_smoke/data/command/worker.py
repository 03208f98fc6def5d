"""The process that runs code of users and libraries."""

from typing import TYPE_CHECKING

from assay.runs import Progress

if TYPE_CHECKING:
    from assay_smoke.data.command.requests import DataAnswer, DataRequest


def run_checks(request: "DataRequest", progress: Progress) -> "DataAnswer":
    """Run every check that the request asks for."""
    import multiprocessing

    import torch

    from assay_smoke.data.command.planned_checks import ChecksPlan
    from assay_smoke.data.command.requests import CheckReport, DataAnswer
    from assay_smoke.data.properties import RaisedError, SubjectReport

    # Workers of data loaders are forked, since a new interpreter cannot import users' files.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # more threads are slower on models of this size
    plan = ChecksPlan(request)
    reports = []
    checks = plan.checks()
    with progress.task("checks properties", len(checks)) as task:
        for check in checks:
            with progress.step(f"{check.level}: {check.name}"):
                try:
                    found = CheckReport(level=check.level, report=check.run())
                except RaisedError as error:
                    if check.is_own:
                        raise
                    nothing = SubjectReport(subject=check.name, cases={})
                    found = CheckReport(level=check.level, report=nothing, problem=str(error))
            reports.append(found)
            task.advance()
    return DataAnswer(checks=reports, left_out=plan.left_out, notes=plan.notes)
