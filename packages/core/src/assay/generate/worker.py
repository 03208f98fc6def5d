"""A process of its own for each side: `python -m assay.generate.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `request["kind"]` says with `request["request"]`."""
    from assay.generate import requests
    from assay.generate.candidate import run_candidate
    from assay.generate.closer import look_closer
    from assay.generate.equivalence import run_equivalence
    from assay.generate.golden import capture_golden

    body = request["request"]
    match request["kind"]:
        case "capture":
            manifest = capture_golden(requests.CaptureRequest.model_validate(body), progress)
            return manifest.model_dump(mode="json", by_alias=True)
        case "candidate":
            report = run_candidate(requests.CandidateRequest.model_validate(body), progress)
            return report.model_dump(mode="json")
        case "closer":
            return look_closer(requests.CloserRequest.model_validate(body), progress)
        case "equivalence":
            return run_equivalence(requests.EquivalenceRequest.model_validate(body), progress)
        case kind:
            raise ValueError(f"no work of kind {kind!r}")


if __name__ == "__main__":
    serve(work)
