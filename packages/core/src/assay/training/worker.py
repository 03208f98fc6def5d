"""A process of its own for each side: `python -m assay.training.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `request["kind"]` says with `request["request"]`."""
    from assay.training import overfit_requests, requests
    from assay.training.candidate import run_candidate
    from assay.training.golden import record_reference
    from assay.training.overfit_runs import examine_trained, overfit_candidate, overfit_trusted

    body = request["request"]
    match request["kind"]:
        case "reference":
            asked = requests.ReferenceRequest.model_validate(body)
            return record_reference(asked, progress).model_dump(mode="json")
        case "candidate":
            judged = requests.CandidateRequest.model_validate(body)
            return run_candidate(judged, progress).model_dump(mode="json")
        case "overfit-reference":
            trusted = overfit_requests.OverfitRequest.model_validate(body)
            return overfit_trusted(trusted, progress).model_dump(mode="json")
        case "overfit-candidate":
            overfitting = requests.CandidateRequest.model_validate(body)
            return overfit_candidate(overfitting, progress).model_dump(mode="json")
        case "exam":
            exam = overfit_requests.ExamRequest.model_validate(body)
            return examine_trained(exam, progress).model_dump(mode="json")
        case kind:
            raise ValueError(f"no work of kind {kind!r}")


if __name__ == "__main__":
    serve(work)
