"""A process of its own for each side: `python -m assay.training.worker REQUEST`."""

from typing import TYPE_CHECKING, Any

from assay.runs import Progress
from assay.runs.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.verdicts import Record


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `request["kind"]` says with `request["request"]`."""
    from assay.training.overfit.requests import MemorizationRequest
    from assay.training.overfit.sides import measure_trained, overfit_candidate, overfit_trusted
    from assay.training.processes.candidate import run_candidate
    from assay.training.processes.reference import record_reference
    from assay.training.processes.requests import (
        CandidateRequest,
        ReferenceRequest,
        UserCodeRequest,
    )
    from assay.training.processes.user_code import load_user_code

    works: dict[str, tuple[type[Record], Callable[[Any, Progress], Record]]] = {
        "user-code": (UserCodeRequest, load_user_code),
        "reference": (ReferenceRequest, record_reference),
        "candidate": (CandidateRequest, run_candidate),
        "overfit-reference": (ReferenceRequest, overfit_trusted),
        "overfit-candidate": (CandidateRequest, overfit_candidate),
        "memorization": (MemorizationRequest, measure_trained),
    }
    kind = request["kind"]
    if kind not in works:
        raise ValueError(f"no work of kind {kind!r}")
    request_type, do = works[kind]
    return do(request_type.model_validate(request["request"]), progress).model_dump(mode="json")


if __name__ == "__main__":
    serve(work)
