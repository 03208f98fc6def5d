"""The process that runs models: captures an expectation, or looks at those of this machine."""

from pathlib import Path
from typing import Any

from assay.devices.registry import open_run
from assay.devices.run_string import Run, parse_run
from assay.runs import Progress
from assay.runs.worker import serve
from assay_expectations.observing import (
    capture_signature,
    machine_of,
    observe_expectation,
    open_candidate,
)
from assay_expectations.records import Machine, read_expectation
from assay_expectations.requests import AllSeen, Captured, CaptureRequest, Seen, VerifyRequest


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer a CaptureRequest or a VerifyRequest, whichever is wrapped."""
    answer: Captured | AllSeen
    if "capture" in request:
        answer = _capture(CaptureRequest.model_validate(request["capture"]), progress)
    else:
        answer = _look(VerifyRequest.model_validate(request["verify"]), progress)
    return answer.model_dump(mode="json")


def _capture(request: CaptureRequest, progress: Progress) -> Captured:
    candidate = open_candidate(request.model, parse_run(request.run), request.settings)
    signature = capture_signature(request.model, candidate, progress)
    return Captured(key=candidate.key, signature=signature)


def _look(request: VerifyRequest, progress: Progress) -> AllSeen:
    run = parse_run(request.run)
    machine = machine_of(run, open_run(run))
    with progress.task(f"expectations on {run}", len(request.files)) as task:
        seen = []
        for file in request.files:
            seen.append(_look_at(file, run, machine, request.setup))
            task.advance()
    return AllSeen(seen=seen)


def _look_at(file: str, run: Run, machine: Machine, setup: str | None) -> Seen:
    expectation = read_expectation(Path(file))
    if expectation.key.machine != machine:
        return Seen(file=file, machine=machine)
    settings = expectation.key.content.settings
    candidate = open_candidate(expectation.model, run, settings, setup)
    if candidate.key != expectation.key:
        return Seen(file=file, machine=machine, key=candidate.key)
    values = observe_expectation(expectation, candidate)
    return Seen(file=file, machine=machine, key=candidate.key, log_probabilities=values)


if __name__ == "__main__":
    serve(work)
