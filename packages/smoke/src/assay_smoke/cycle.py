"""One cycle from the outside: two processes, one verdict, files in a folder."""

from pathlib import Path
from typing import Literal

from assay.runs import Progress, run_process
from assay.runs.results import write_results
from assay.verdicts import Verdict
from assay_smoke.judging import judge_cycle
from assay_smoke.planning import Cycle
from assay_smoke.reports import PartReport, PartRequest

WORKER = "assay_smoke.worker"


def run_cycle(cycle: Cycle, folder: Path, progress: Progress) -> Verdict:
    """Train once without and once with an interruption; write verdict.json into `folder`."""
    uninterrupted = _run(cycle, "uninterrupted", folder, progress)
    resumed = _run(cycle, "resumed", folder, progress)
    verdict, measurements = judge_cycle(cycle, uninterrupted, resumed)
    return write_results(verdict, measurements, folder)


def _run(
    cycle: Cycle, part: Literal["uninterrupted", "resumed"], folder: Path, progress: Progress
) -> PartReport:
    request = PartRequest(
        part=part,
        cycle=cycle,
        checkpoint=str(folder / "checkpoint"),
        output=str(folder / "checkpoint-end"),
    )
    answer = run_process(WORKER, request.model_dump(), folder, name=part, progress=progress)
    return PartReport.model_validate(answer.result)
