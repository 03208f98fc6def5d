"""A process of its own for each side: `python -m assay.generate.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Capture a golden, run a candidate, or look closer at one stage, as `request["kind"]` says."""
    from assay.generate.candidate import run_candidate
    from assay.generate.closer import look_closer
    from assay.generate.golden import capture_golden
    from assay.generate.requests import CandidateRequest, CaptureRequest, CloserRequest

    if request["kind"] == "capture":
        capture = CaptureRequest.model_validate(request["request"])
        return capture_golden(capture, progress).model_dump(mode="json", by_alias=True)
    if request["kind"] == "closer":
        return look_closer(CloserRequest.model_validate(request["request"]), progress)
    candidate = CandidateRequest.model_validate(request["request"])
    return run_candidate(candidate, progress).model_dump(mode="json")


if __name__ == "__main__":
    serve(work)
