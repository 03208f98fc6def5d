"""Loading a user's code before a check trains anything: a typo then costs no reference run."""

from assay.plugins import load_object
from assay.runs import Progress
from assay.training.processes.requests import UserCodeRequest
from assay.training.trainers.registry import try_trainer


def load_user_code(request: UserCodeRequest, progress: Progress) -> UserCodeRequest:
    """Import the trainer and the setup function of a request, in a process of their own.

    Returns: the request. Raises: UsageError for what a candidate could not run.
    """
    del progress  # it takes as long as importing a file
    if request.trainer is not None:
        try_trainer(request.trainer, request.num_ranks)
    if request.setup is not None:
        load_object(request.setup)
    return request
