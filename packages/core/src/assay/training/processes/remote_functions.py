"""The functions that the processes of a training check call. Importing it imports no torch."""

from typing import TYPE_CHECKING

from assay.launch import RemoteFunction

if TYPE_CHECKING:
    from assay.training.processes.requests import (
        ReferenceReport,
        TrainCheck,
        UserCodeReport,
    )
    from assay.training.processes.trainer_report import TrainerReport

# The fork server imports these once for all processes of a check.
PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    "assay.training.processes.candidate",
)

USER_CODE: "RemoteFunction[TrainCheck, UserCodeReport]" = RemoteFunction(
    "assay.training.processes.candidate_side:load_user_code", PRELOAD
)
REFERENCE: "RemoteFunction[TrainCheck, ReferenceReport]" = RemoteFunction(
    "assay.training.processes.reference:record_reference", PRELOAD
)
CANDIDATE: "RemoteFunction[TrainCheck, TrainerReport]" = RemoteFunction(
    "assay.training.processes.candidate:run_candidate", PRELOAD
)
