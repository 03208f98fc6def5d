"""What the worlds of a case are asked for, and what each of their ranks answers."""

from pydantic import Field

from assay.training.processes.requests import ReferenceReport, StepRecord, TrainerRequest
from assay.training.processes.trainer_report import TrainerReport
from assay.training.state.records import TrajectoryRecord
from assay.verdicts import Number, Record
from assay_smoke.matrix.cases import Checkpoint

# In the folder of a case.
CHECKPOINT, LAST_CHECKPOINT = "checkpoint", "last-checkpoint"
# Written by a run that was sent SIGTERM in the middle of a step.
TERMINATED_CHECKPOINT = "terminated-checkpoint"

Hashes = dict[str, str]


class ReferenceAnswer(Record):
    """What the trusted process answers, beside the states in its folder.

    logits_noise: relative error of the noise run's logits against the yardstick's, where both end.
    moved: parameters of which the noise run changed most elements: a narrow dtype rounds small
        updates away.
    """

    training: ReferenceReport
    logits_noise: Number
    moved: list[str]


class CaseRequest(Record):
    """What every world of a case is given.

    candidate: trainer, options, golden and folder.
    kind: of checkpoint that is tried beyond what all are.
    timelines: folder for the phases of each rank of this world.
    checkpoint: of which a world resumes, or which it reads; empty for none.
    """

    candidate: TrainerRequest
    kind: Checkpoint
    timelines: str
    checkpoint: str = ""


class Survivors(Record):
    """Tensors that outlived a tear-down: bytes in all, and the shapes of the largest."""

    num_bytes: int = 0
    shapes: list[str] = Field(default_factory=list)


class TrainAnswer(Record):
    """What a rank of `train` answers.

    before, after: hash of every parameter and buffer at the first and after the last step.
    held: hash of every part of a parameter or moment that this rank has after the last step.
    parameter_bytes: of what the rank has of the parameters while it trains.
    survivors: of the tear-down.
    """

    report: TrainerReport
    before: Hashes
    after: Hashes
    held: Hashes
    parameter_bytes: int
    survivors: Survivors


class TerminateAnswer(Record):
    """What a rank of `terminate` answers: whether the signal reached it, and its steps until then."""

    was_signalled: bool
    steps: list[StepRecord]


class ResumeAnswer(Record):
    """What a rank of `resume` answers.

    held: as in TrainAnswer; problem: why the checkpoint could not be loaded.
    """

    steps: list[StepRecord] = Field(default_factory=list)
    held: Hashes = Field(default_factory=dict)
    trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    problem: str | None = None


class RestartAnswer(Record):
    """What a rank of `restart` answers: the first loss of a run that starts from a saved model."""

    loss: Number


class ReadAnswer(Record):
    """What plain transformers and peft make of the last checkpoint's model.

    logits_error: relative error of its logits against the yardstick's.
    adapter_effect: of the adapter on the logits; merged_error, unmerged_error: of the adapter merged
        into the weights, and taken out again, against the adapter beside them, in float64;
        exported_error: of the merged model saved and loaded again. None where it was not tried.
    problem: why it could not be read.
    """

    logits_error: Number | None = None
    adapter_effect: Number | None = None
    merged_error: Number | None = None
    unmerged_error: Number | None = None
    exported_error: Number | None = None
    problem: str | None = None
