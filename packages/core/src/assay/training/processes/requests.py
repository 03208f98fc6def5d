"""Requests to the processes of `assay check train`, and their answers, as JSON."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.models.loaded.report import LoadReport, SetupChanges
from assay.models.remote_code import RemoteCode
from assay.sites import Phase
from assay.stages import LabelFault
from assay.training.protocol import TrainingPlan
from assay.training.shapes import Shapes
from assay.training.state.records import HeldPart, StateValue, TrajectoryRecord
from assay.verdicts import Number, Record


class TrainOptions(Record):
    """What is trained, alike on both sides.

    mixed_precision: whether the candidate keeps in float32 what it does not compute with.
    shapes: which micro-batches of a step have equally many rows and tokens.
    """

    model: str
    steps: int = 3
    resume_at: int = 2
    micro_batches: int = 2
    lora: bool = False
    adapter_dropout: float = 0.1
    mixed_precision: bool = False
    shapes: Shapes = "unequal"
    seed: int = 0
    learning_rate: float = 1e-3
    remote_code: RemoteCode = "refuse"

    def plan(
        self,
        run: str,
        setup: str | None = None,
        mesh: Mapping[str, int] | None = None,
        features: Iterable[str] = (),
    ) -> TrainingPlan:
        """The plan of a trainer on `run`."""
        return TrainingPlan(
            model=self.model,
            run=run,
            steps=self.steps,
            micro_batches=self.micro_batches,
            resume_at=self.resume_at,
            seed=self.seed,
            learning_rate=self.learning_rate,
            features=frozenset({"lora"} if self.lora else ()) | frozenset(features),
            mesh=mesh or {},
            adapter_dropout=self.adapter_dropout,
            setup=setup,
            remote_code=self.remote_code,
        )


def scaled_folder(folder: Path) -> Path:
    """Where the second replay writes, of a trainer that scales its loss; `folder`: the first's."""
    return folder / "scaled"


class ReferenceRequest(Record):
    """What the trusted process is asked for: yardstick and noise run for candidates in `dtype`."""

    options: TrainOptions
    reference: str
    dtype: str
    folder: str


class CandidateRequest(Record):
    """What the candidate process is asked for: the trainer that is judged, against a golden."""

    options: TrainOptions
    candidate: str
    golden: str
    folder: str
    trainer: str | None = None
    setup: str | None = None
    mesh: dict[str, int] = Field(default_factory=dict)
    features: list[str] = Field(default_factory=list)


class UserCodeRequest(Record):
    """Code of the user that a candidate will run: is it there, and has it the right form?

    trainer: NAME or FILE.py:CLASS; setup: FILE.py:FUNC; None where there is none.
    num_ranks: of the candidate. A trainer for several is imported and not constructed: it may
        need the process group.
    """

    trainer: str | None = None
    setup: str | None = None
    num_ranks: int = 1


class UserCodeReport(Record):
    """What is read of a user's trainer before anything runs.

    pipeline_shapes: of the micro-batches that its pipelines take.
    """

    pipeline_shapes: Shapes


class StepRecord(Record):
    """One optimizer step of a free run.

    updated: whether it changed any parameter that the optimizer holds.
    num_skipped: how often the trainer skipped it before it made it.
    """

    step: int
    loss: Number
    num_tokens: int
    grad_norm: Number
    updated: bool = True
    num_skipped: int = 0


class KeptPrecision(Record):
    """What a run under mixed precision keeps in less than float32.

    parameters: trained ones in a narrower dtype, of which the optimizer has no wider copy; copied:
        those of which it has one.
    moments: name of the parameter and of the moment.
    rounded: parameters in float32 that something rounds between two steps.
    """

    parameters: list[str] = Field(default_factory=list)
    copied: list[str] = Field(default_factory=list)
    moments: list[str] = Field(default_factory=list)
    rounded: list[str] = Field(default_factory=list)


class FreeRun(Record):
    """A run of which nothing is replaced, and its resumption from the checkpoint in the middle.

    saved: names of tensors that differ between the model folder and the model that was saved.
    not_restored: parts of the state that are not as they were saved, and generators that steps
        draw from and the state does not hold; compared: how many parts there are.
    problem: why the checkpoint could not be written or read.
    generators_compared: whether the state that was compared has the random number generators.
    held: after each step what this rank has of every parameter and moment, each with its hash.
    changed_by_saving: parts of the state that are not as they were before it was saved.
    settings: of the model folder's configuration what is not the model's.
    trajectory, resumed_trajectory: where it, and the resumed run, take each parameter.
    masks: of each micro-batch a hash of the generator's state at its first mask of dropout.
    ended_otherwise: what the resumed run holds after its last step that is not the uninterrupted
        run's.
    kept: in which precision it keeps what it trains; None where none is promised.
    """

    steps: list[StepRecord] = Field(default_factory=list)
    resumed: list[StepRecord] = Field(default_factory=list)
    saved: list[str] = Field(default_factory=list)
    settings: list[str] = Field(default_factory=list)
    changed_by_saving: list[StateValue] = Field(default_factory=list)
    ended_otherwise: list[str] = Field(default_factory=list)
    masks: list[str] = Field(default_factory=list)
    trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    resumed_trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    not_restored: list[StateValue] = Field(default_factory=list)
    compared: int = 0
    saved_compared: int = 0
    problem: str | None = None
    notes: list[str] = Field(default_factory=list)
    generators_compared: bool = False
    held: list[list[tuple[HeldPart, str]]] = Field(default_factory=list)
    kept: KeptPrecision | None = None


class ReferenceReport(Record):
    """The answer of the trusted process, in addition to the files of the golden.

    yardstick_losses: of the recorded steps: between them the state is rounded to the candidate's
        dtype, as a run in that dtype has it.
    noise_losses: losses of the noise run, which runs without injection. noise_trajectory: its end.
    num_tokens: the unmasked label tokens of each step.
    num_rows: rows of each micro-batch of each step.
    draws: True if training draws random numbers, as dropout does.
    load: findings from loading the model.
    usage: parts of its model that the yardstick used. untouched: trained parameters without gradient.
    """

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick_losses: list[Number]
    noise_losses: list[Number]
    noise_trajectory: list[TrajectoryRecord]
    num_tokens: list[int]
    num_rows: list[list[int]]
    num_trainable: int
    shared: list[list[str]]
    draws: bool = False
    load: LoadReport | None = None
    usage: Usage = Field(default_factory=Usage)
    untouched: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class CandidateReport(Record):
    """The answer of the candidate process, in addition to the files with its measurements.

    seen: phases whose method was called; invisible: those that cannot be observed, and why.
    weights_different: parameters that are not the reference's before the first step; changes: by
        how much.
    load: what this process found when it had loaded the model by itself, for no trainer.
    not_in_optimizer: parameters that the reference trains and this optimizer does not hold.
    unexpectedly_trained: parameters that this optimizer changes and the reference does not train.
    not_loaded: parts of a state that the trainer's load_state_dict does not take over.
    drew_in_backward: True if a backward pass changed the state of the generator.
    micro_batches_run: step and number of each micro-batch that this process ran.
    coordinates: of this process on the mesh.
    partial_modules: modules of which this process has only some children.
    unmeasured: ports of its modules that it declares to have other values, without effect.
    absent: parameters and buffers of the model that this process does not have.
    adapter_start: parameters of an adapter that do not start as an adapter does.
    errors_of_sums: by parameter how far its gradient is, after the last backward pass of a step, from
        the sum of what these passes gave it: relative to the root of the squares of what was summed.
        Parameters of which that cannot be seen are not among them.
    sharded_gradients: elements of gradients that are not among them as they are sharded, not zero;
        narrow_gradients: those that are exact in the run's dtype.
    updates_expected: elements that the reference's updates change; updates_made: those of them that
        updates here change too.
    dropout_masks: what the trainer declares of masks on ranks of dp, see TrainerTraits.
    inexact_resume: what it declares of resumed runs, see there; update_rounding: of its optimizer.
    labels: labels of its losses that differ from the reference's.
    shares: how often each micro-batch that it ran is in the gradients of its step.
    rank_shares: how often each rank's part is in the reduced gradients.
    norms: of the gradients after each phase of every step.
    packed: numbers of micro-batches that were run as one.
    changed_by_skipping: parts of the state that are not as they were before a skipped step.
    unapplied: features that were asked for and are not seen in what this process runs, see
        `assay.training.processes.unapplied_features`.
    trainer_notes: what the trainer has the verdict say of it.
    scaled_steps: the steps of the second replay, which a trainer is given that scales its loss by
        one factor; empty where there was none.
    usage: parts of its model that this process used.
    """

    run: dict[str, Any]
    free: FreeRun
    seen: list[str]
    invisible: dict[str, str]
    weights_different: list[str]
    changes: SetupChanges = Field(default_factory=SetupChanges)
    load: LoadReport | None = None
    not_in_optimizer: list[str]
    unexpectedly_trained: list[str] = Field(default_factory=list)
    shared: list[list[str]]
    not_loaded: list[StateValue]
    drew_in_backward: bool = False
    logit_gradients: list["LogitGradientScale"] = Field(default_factory=list)
    micro_batches_run: list[tuple[int, int]] = Field(default_factory=list)
    coordinates: dict[str, int] = Field(default_factory=dict)
    partial_modules: list[str] = Field(default_factory=list)
    unmeasured: list[str] = Field(default_factory=list)
    absent: list[str] = Field(default_factory=list)
    adapter_start: list[str] = Field(default_factory=list)
    errors_of_sums: dict[str, Number] = Field(default_factory=dict)
    sharded_gradients: int = 0
    narrow_gradients: int = 0
    updates_expected: int = 0
    updates_made: int = 0
    dropout_masks: Literal["own", "shared"] | None = None
    inexact_resume: str | None = None
    update_rounding: float = 0.0
    labels: list["LabelRecord"] = Field(default_factory=list)
    shares: list["GradientShareRecord"] = Field(default_factory=list)
    rank_shares: list["GradientShareRecord"] = Field(default_factory=list)
    norms: list["GradientNormRecord"] = Field(default_factory=list)
    packed: list[tuple[int, ...]] = Field(default_factory=list)
    changed_by_skipping: list[StateValue] = Field(default_factory=list)
    unapplied: list[str] = Field(default_factory=list)
    trainer_notes: list[str] = Field(default_factory=list)
    scaled_steps: list["ScaledStepRecord"] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)


class LogitGradientScale(Record):
    """The gradient at the logits of one micro-batch, compared with the reference's.

    slope: of the error on the expected value; rest: what the slope leaves, as a relative error.
    loss_gradient: the gradient of what `compute_loss` returned.
    """

    step: int
    micro_batch: int
    slope: Number
    rest: Number
    loss_gradient: Number = 1.0


class ScaledStepRecord(Record):
    """A step whose loss was scaled: the fields of `assay.locating.loss_scale.ScaledStep`."""

    step: int
    factor: Number
    of_loss: Number
    taken_off: Phase | None = None
    norm: Number | None = None
    left: Number | None = None
    averaged: Phase | None = None


class LabelRecord(Record):
    """A record of wrong labels, with the fields of `assay.locating.label_gradients.LabelDifference`."""

    step: int
    micro_batch: int
    row: int
    fault: LabelFault
    count: int


class GradientShareRecord(Record):
    """A record of `assay.training.replay.observing.gradient_sums.GradientShare`."""

    step: int
    source: int
    share: Number


class GradientNormRecord(Record):
    """Global norms of a process: the fields of `assay.training.replay.observing.observed_gradients.GradientNorm`."""

    step: int
    phase: Phase
    first: Number
    found: Number
    injected: Number
