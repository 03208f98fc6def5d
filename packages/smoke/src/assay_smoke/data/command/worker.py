"""The process that runs users' code and the libraries': `python -m assay_smoke.data.command.worker`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Check every subject that the request asks for."""
    import multiprocessing

    import torch

    from assay_smoke.data.command.planned_checks import ChecksPlan
    from assay_smoke.data.command.requests import CheckReport, DataAnswer, DataRequest
    from assay_smoke.data.properties import SubjectReport
    from assay_smoke.data.running_code import RaisedError

    # Workers of data loaders are forked: users' files are not importable in a new interpreter.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # more than one is slower on models of this size
    plan = ChecksPlan(DataRequest.model_validate(request))
    reports = []
    checks = plan.checks()
    with progress.task("checks properties", len(checks)) as task:
        for check in checks:
            with progress.step(f"{check.subject}: {check.name}"):
                try:
                    found = CheckReport(subject=check.subject, report=check.run())
                except RaisedError as error:
                    if check.is_own:
                        raise
                    nothing = SubjectReport(subject=check.name, cases={})
                    found = CheckReport(subject=check.subject, report=nothing, problem=str(error))
            reports.append(found)
            task.advance()
    answer = DataAnswer(checks=reports, left_out=plan.left_out, notes=plan.notes)
    return answer.model_dump(mode="json")


if __name__ == "__main__":
    serve(work)
