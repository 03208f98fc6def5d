"""Evaluations from the outside: a process that runs the model, a folder with result and verdict."""

from pathlib import Path

from assay.devices.run_string import parse_run
from assay.models.sources import resolve_model
from assay.runs import Progress, provenance, run_process
from assay.runs.folders import write_whole
from assay.runs.results import write_results
from assay.verdicts import Verdict
from assay.watchdog import temporary_folder
from assay_bench.judging import judge_change, judge_score
from assay_bench.results import RESULT_FILE, BenchResult, EvaluationRequest, read_result

WORKER = "assay_bench.worker"


def run_bench(asked: EvaluationRequest, progress: Progress) -> Verdict:
    """Evaluate, and write result.json and verdict.json into the request's folder."""
    parse_run(asked.run)
    source = resolve_model(asked.model)
    with temporary_folder("assay-bench-") as cache:
        environment = {"HF_DATASETS_CACHE": str(cache), "TQDM_DISABLE": "1"}
        if source.kind != "hub":
            environment["HF_HUB_OFFLINE"] = "1"
        answer = run_process(
            WORKER,
            asked.model_dump(),
            Path(asked.folder),
            name="evaluation",
            progress=progress,
            environment=environment,
        )
    result = BenchResult.model_validate(answer.result | {"provenance": provenance()})
    folder = Path(asked.folder)
    write_whole(folder / RESULT_FILE, result.model_dump_json(by_alias=True) + "\n")
    return write_results(*judge_score(result), folder)


def compare_results(expected: Path, actual: Path, folder: Path) -> Verdict:
    """Judge the result in the folder `actual` by that in `expected`."""
    return write_results(*judge_change(read_result(expected), read_result(actual)), folder)
