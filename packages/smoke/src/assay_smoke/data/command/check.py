"""`assay smoke data` from the outside: one process, one verdict, files in a folder."""

from pathlib import Path

from assay.runs import Progress, run_process
from assay.runs.results import write_results
from assay.verdicts import Verdict
from assay_smoke.data.command.requests import DataAnswer, DataRequest
from assay_smoke.data.command.verdict import judge_data

WORKER = "assay_smoke.data.command.worker"


def check_data(request: DataRequest, folder: Path, progress: Progress) -> Verdict:
    """Check what the request names; write verdict.json into `folder`. Raises: UsageError."""
    answer = DataAnswer.model_validate(
        run_process(WORKER, request.model_dump(), folder, name="data", progress=progress).result
    )
    return write_results(judge_data(request, answer), [], folder)
