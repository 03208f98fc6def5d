"""Imports the user's trainer and setup function, so that a typo costs no reference run."""

from math import prod

from assay.plugins import load_object
from assay.runs import Progress
from assay.training.processes.requests import TrainCheck, UserCodeReport
from assay.training.shapes import OF_NAMED_PIPELINES
from assay.training.trainers.registry import pipeline_shapes_of, stated_plan_of, try_trainer


def load_user_code(request: TrainCheck, _progress: Progress) -> UserCodeReport:
    """Import the user's code.

    Raises: UsageError for code that a candidate could not run.
    """
    shapes, stated = OF_NAMED_PIPELINES, {}
    if request.trainer is not None:
        try_trainer(request.trainer, prod(request.mesh.values()))
        shapes, stated = pipeline_shapes_of(request.trainer), stated_plan_of(request.trainer)
    if request.setup is not None:
        load_object(request.setup)
    return UserCodeReport(pipeline_shapes=shapes, stated_plan=stated)
