"""A process of its own for each side: `python -m assay.training.processes.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `request["kind"]` says with `request["request"]`."""
    from assay.plugins import load_object
    from assay.training.overfit import requests as overfit_requests
    from assay.training.overfit.sides import measure_trained, overfit_candidate, overfit_trusted
    from assay.training.processes import requests
    from assay.training.processes.candidate import run_candidate
    from assay.training.processes.reference import record_reference
    from assay.training.trainers.registry import try_trainer

    body = request["request"]
    match request["kind"]:
        case "user-code":
            named = requests.UserCodeRequest.model_validate(body)
            if named.trainer is not None:
                try_trainer(named.trainer, named.num_ranks)
            if named.setup is not None:
                load_object(named.setup)
            return {}
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
        case "memorization":
            memorization = overfit_requests.MemorizationRequest.model_validate(body)
            return measure_trained(memorization, progress).model_dump(mode="json")
        case kind:
            raise ValueError(f"no work of kind {kind!r}")


if __name__ == "__main__":
    serve(work)
