"""Requests to the worlds of a case, and the answers of their ranks."""

from dataclasses import dataclass, field

from pydantic import Field

from assay.training.processes.requests import ReferenceReport, StepRecord, TrainCheck
from assay.training.processes.trainer_report import TrainerReport
from assay.training.state.records import TrajectoryRecord
from assay.verdicts import Number, Record
from assay_smoke.matrix.cases import Checkpoint

# Folders of a case.
CHECKPOINT, LAST_CHECKPOINT = "checkpoint", "last-checkpoint"
# Written by a run that got SIGTERM within a step.
TERMINATED_CHECKPOINT = "terminated-checkpoint"

Hashes = dict[str, str]


class ReferenceAnswer(Record):
    """Answer of the reference process. Its states are in its folder."""

    training: ReferenceReport
    logits_noise: Number
    """Relative error of the noise run's final logits against the yardstick's."""
    moved: list[str]
    """Parameters of which the noise run changed most elements. A narrow dtype rounds small updates away."""


class CaseRequest(Record):
    """Request to a world of a case."""

    candidate: TrainCheck
    kind: Checkpoint
    """Checkpoint that the case tries on top of those that every case tries."""
    timelines: str
    """Folder for the phases of each rank."""
    checkpoint: str = ""
    """Checkpoint to resume from or to read; empty for none."""


class Survivors(Record):
    """Tensors that outlived a teardown."""

    num_bytes: int = 0
    shapes: list[str] = Field(default_factory=list)
    """Shapes of the largest."""


@dataclass(frozen=True, kw_only=True)
class TrainAnswer:
    """Answer of a rank of `train`."""

    report: TrainerReport
    before: Hashes
    """Hash of every parameter and buffer before the first step."""
    after: Hashes = field(default_factory=dict)
    """The same after the last step."""
    parameter_bytes: int
    """Size of the rank's parameters during training."""
    survivors: Survivors = field(default_factory=Survivors)


class StepsAnswer(Record):
    """Answer of a rank of `terminate`, `resume` or `restart`. Only `resume` measures the end."""

    steps: list[StepRecord] = Field(default_factory=list)
    was_signalled: bool = False
    """True if SIGTERM arrived."""
    held: Hashes = Field(default_factory=dict)
    """Hash of every part of a parameter or moment that this rank holds after the last step."""
    trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    problem: str | None = None
    """Why the checkpoint could not be loaded."""


class ReadAnswer(Record):
    """Measurements of the last checkpoint's model in plain transformers and peft. None: not measured."""

    logits_error: Number | None = None
    """Relative error of its logits against the yardstick's."""
    adapter_effect: Number | None = None
    """Relative change of the logits by the adapter."""
    merged_errors: dict[str, Number] = Field(default_factory=dict)
    """By what was done to the adapter, the relative error against the unmerged one's logits, in float64."""
    problem: str | None = None
    """Why the model could not be read."""
