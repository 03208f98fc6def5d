"""Does the work of one process of a check: `python -m assay.training.worker REQUEST`."""

from typing import TYPE_CHECKING, Any

from assay.runs import Progress
from assay.runs.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.training.processes.requests import UserCodeReport, UserCodeRequest
    from assay.verdicts import Record


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do the work that `request["kind"]` names, for `request["request"]`."""
    from assay.training.overfit.sides import measure_trained, overfit_candidate, overfit_trusted
    from assay.training.processes.candidate import run_candidate
    from assay.training.processes.reference import record_reference
    from assay.training.processes.requests import (
        ReferenceRequest,
        TrainerRequest,
        UserCodeRequest,
    )

    works: dict[str, tuple[type[Record], Callable[[Any, Progress], Record]]] = {
        "user-code": (UserCodeRequest, load_user_code),
        "reference": (ReferenceRequest, record_reference),
        "candidate": (TrainerRequest, run_candidate),
        "overfit-reference": (ReferenceRequest, overfit_trusted),
        "overfit-candidate": (TrainerRequest, overfit_candidate),
        "memorization": (ReferenceRequest, measure_trained),
    }
    request_type, do = works[request["kind"]]
    return do(request_type.model_validate(request["request"]), progress).model_dump(mode="json")


def load_user_code(request: "UserCodeRequest", progress: Progress) -> "UserCodeReport":
    """Import the user's trainer and setup function, so that a typo costs no reference run.

    Raises: UsageError for code that a candidate could not run.
    """
    from assay.plugins import load_object
    from assay.training.processes.requests import UserCodeReport
    from assay.training.shapes import OF_NAMED_PIPELINES
    from assay.training.trainers.registry import pipeline_shapes_of, try_trainer

    del progress  # importing a file takes no time
    shapes = OF_NAMED_PIPELINES
    if request.trainer is not None:
        try_trainer(request.trainer, request.num_ranks)
        shapes = pipeline_shapes_of(request.trainer)
    if request.setup is not None:
        load_object(request.setup)
    return UserCodeReport(pipeline_shapes=shapes)


if __name__ == "__main__":
    serve(work)
