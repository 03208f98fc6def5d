"""A process of its own for each side: `python -m assay.generate.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Capture a golden or run a candidate, as `request["kind"]` says."""
    from assay.generate.candidate import run_candidate  # noqa: PLC0415 - torch, transformers
    from assay.generate.golden import capture_golden  # noqa: PLC0415
    from assay.generate.requests import CandidateRequest, CaptureRequest  # noqa: PLC0415

    if request["kind"] == "capture":
        capture = CaptureRequest.model_validate(request["request"])
        return capture_golden(capture, progress).model_dump(mode="json", by_alias=True)
    candidate = CandidateRequest.model_validate(request["request"])
    return run_candidate(candidate, progress).model_dump(mode="json")


if __name__ == "__main__":
    serve(work)
