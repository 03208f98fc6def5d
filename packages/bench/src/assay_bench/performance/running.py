"""Measurement of suites in this environment, one after the other."""

from collections.abc import Sequence
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.files import write_whole
from assay.models.sources import resolve_model
from assay.runs import Progress, provenance
from assay_bench.performance.environments import Environment
from assay_bench.performance.requests import SuiteRequest
from assay_bench.performance.results import RESULT_FILE, PerformanceResult, machine_kind
from assay_bench.performance.suite_process import suite_process
from assay_bench.performance.suite_table import SpeedSuite


def run_suites(
    request: SuiteRequest, suites: Sequence[SpeedSuite], folder: Path, progress: Progress
) -> PerformanceResult:
    """Measure `suites` in this environment, and write performance.json into `folder`.

    Raises: UsageError for an unknown run or model; MachineError, with the end of the log, if a suite
        fails or none can run here.
    """
    parse_run(request.run)
    resolve_model(request.model)
    with suite_process(Environment.current(), suites, request, folder) as process:
        with progress.step(f"loads {request.model} on {request.run}"):
            process.wait_until_ready()
        while (suite := process.waiting_for) is not None:
            with progress.task(f"measures {suite}", request.num_turns, "rounds") as task:
                while process.waiting_for == suite:
                    process.run_round()
                    task.advance()
        results, device = process.results()
    for name, reason in process.skipped.items():
        progress.note(f"{name}: skipped: {reason}")
    if not results:
        raise MachineError(f"no suite can run here: {'; '.join(process.skipped.values())}")
    origin = provenance()
    result = PerformanceResult(
        machine=machine_kind(device, origin["num_cpus"]),
        run=request.run,
        model=request.model,
        suites=results,
        skipped=process.skipped,
        device=device,
        versions=device["versions"],
        provenance=origin,
    )
    write_whole(folder / RESULT_FILE, result.to_json())
    return result
