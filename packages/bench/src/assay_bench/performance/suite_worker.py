"""The process that measures suites, one round per turn: `python -m assay_bench.performance.suite_worker REQUEST`."""

import sys
from functools import partial
from pathlib import Path

from assay.devices.registry import describe_run
from assay.errors import AssayError, UsageError
from assay.watchdog import temporary_folder
from assay_bench.performance import suites
from assay_bench.performance.measurement import SuiteSkippedError, Work, Workbench
from assay_bench.performance.records import SuiteEvent, SuiteRequest, TurnClient


def measure_suites(request: SuiteRequest, turns: TurnClient, folder: Path) -> None:
    """Measure the suites of `request`, and write their results as events. folder: for their files."""
    bench = Workbench(request, folder)
    for name in request.suites:
        try:
            work: Work[object] = getattr(suites, name.replace("-", "_"))(bench)
        except SuiteSkippedError as skipped:
            turns.send(SuiteEvent(kind="skipped", suite=name, reason=str(skipped)))
            continue
        result = work.measure(name, bench, partial(turns.wait, name))
        device = describe_run(bench.device, bench.run)
        # Another process can still have rounds to run: wait before any other work.
        turns.wait(name)
        turns.send(SuiteEvent(kind="measured", suite=name, result=result, device=device))


def main() -> int:
    """Measure the suites of the request in the arguments. Returns: the exit code."""
    turns = TurnClient()
    try:
        with temporary_folder("assay-suites-") as folder:
            measure_suites(SuiteRequest.model_validate_json(sys.argv[1]), turns, folder)
    except AssayError as error:
        kind = "usage" if isinstance(error, UsageError) else "machine"
        turns.send(SuiteEvent(kind=kind, reason=str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
