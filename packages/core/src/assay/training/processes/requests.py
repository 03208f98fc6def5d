"""Requests to the processes of `assay check train`, and the reference's answer, as JSON.

Importing it imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.devices.run_string import parse_run
from assay.models.inspect.report import LoadReport
from assay.models.sources import RemoteCode
from assay.sites import KeptFiles
from assay.training.protocol import TrainingPlan
from assay.training.shapes import Shapes
from assay.training.state.records import TrajectoryRecord
from assay.verdicts import Number, Record

TRAINING_LIMITS = "training"


class TrainOptions(Record):
    """Training options common to both sides."""

    model: str
    steps: int = 3
    resume_at: int = 2
    micro_batches: int = 2
    lora: bool = False
    adapter_dropout: float = 0.1
    mixed_precision: bool = False
    """True if the candidate keeps weights and moments in float32 and computes in its own dtype."""
    shapes: Shapes = "unequal"
    seed: int = 0
    learning_rate: float = 1e-3
    learning_rate_factors: tuple[float, ...] = ()
    parameter_groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    max_grad_norm: Number = 1.0
    remote_code: RemoteCode = "refuse"

    def plan(
        self,
        run: str,
        setup: str | None = None,
        mesh: Mapping[str, int] | None = None,
        features: Iterable[str] = (),
    ) -> TrainingPlan:
        """Return the plan of a trainer on `run`."""
        return TrainingPlan(
            run=run,
            features=frozenset({"lora"} if self.lora else ()) | frozenset(features),
            mesh=mesh or {},
            setup=setup,
            **self.model_dump(exclude={"lora", "mixed_precision", "shapes"}),
        )


def scaled_folder(folder: Path) -> Path:
    """Return the folder of the second replay, with the loss scale divided out, below the first's."""
    return folder / "scaled"


@dataclass(frozen=True, slots=True)
class TrainCheck:
    """The options of a training check, which travel to the processes of both sides."""

    options: TrainOptions
    reference: str
    candidate: str
    trainer: str | None = None
    setup: str | None = None
    limits: str = TRAINING_LIMITS
    mesh: Mapping[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    allow_unused: tuple[str, ...] = ()
    """GLOBs of modules, parameters and experts that need not be compared."""
    max_disk: int | None = None
    """Bytes that the golden may take; None for the free space."""
    keep: KeptFiles = "full"
    command: tuple[str, ...] = ()
    """The command line that repeats the check."""
    golden: Path = Path()
    folder: Path = Path()
    """The folder that a process writes into: the golden, or the candidate's."""

    @property
    def dtype(self) -> str:
        """The candidate's dtype."""
        return parse_run(self.candidate).dtype


class UserCodeReport(Record):
    """Facts about a user's trainer, read before anything trains."""

    pipeline_shapes: Shapes
    stated_plan: dict[str, Any] = Field(default_factory=dict)


class StepRecord(Record):
    """One optimizer step of a free run."""

    step: int
    loss: Number
    num_tokens: int
    grad_norm: Number
    updated: bool = True
    """True if the step changed any parameter that the optimizer holds."""
    num_skipped: int = 0
    """Number of times that the trainer skipped the step before it made it."""


class ReferenceReport(Record):
    """The answer of the trusted process, in addition to the files of the golden."""

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick_losses: list[Number]
    """Of the recorded steps, between which the state is rounded to the candidate's dtype."""
    noise_losses: list[Number]
    noise_trajectory: list[TrajectoryRecord]
    num_tokens: list[int]
    num_rows: list[list[int]]
    """Rows of each micro-batch of each step."""
    num_trainable: int
    shared: list[list[str]]
    draws: bool = False
    """True if training draws random numbers, for dropout for example."""
    load: LoadReport | None = None
    usage: Usage = Field(default_factory=Usage)
    untouched: list[str] = Field(default_factory=list)
    """Trained parameters without gradient in any step."""
    notes: list[str] = Field(default_factory=list)
