"""Loading a user's code before a check trains anything: a typo then costs no reference run."""

from assay.plugins import load_object
from assay.runs import Progress
from assay.training.processes.requests import UserCodeReport, UserCodeRequest
from assay.training.shapes import OF_NAMED_PIPELINES, Shapes
from assay.training.trainers.registry import pipeline_shapes_of, try_trainer


def load_user_code(request: UserCodeRequest, progress: Progress) -> UserCodeReport:
    """Import the trainer and the setup function of a request, in a process of their own.

    Raises: UsageError for what a candidate could not run.
    """
    del progress  # it takes as long as importing a file
    shapes: Shapes = OF_NAMED_PIPELINES
    if request.trainer is not None:
        try_trainer(request.trainer, request.num_ranks)
        shapes = pipeline_shapes_of(request.trainer)
    if request.setup is not None:
        load_object(request.setup)
    return UserCodeReport(pipeline_shapes=shapes)
