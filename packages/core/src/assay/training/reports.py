"""Options and answers of the processes of `assay check train`. Importing it imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from assay.devices.run_string import parse_run
from assay.judge.coverage import Usage
from assay.models.inspect.report import LoadReport, SetupChanges
from assay.models.sources import RemoteCode
from assay.sites import KeptFiles, Phase
from assay.training.protocol import NEXT_TOKEN, Shapes, StepReport, TrainerTraits, TrainingPlan
from assay.verdicts import Number, Record

if TYPE_CHECKING:
    from assay.replay.gradients import GradientScale, LabelDifference, ScaledStep


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
    frozen: tuple[str, ...] = ()
    loss: str = NEXT_TOKEN
    """Loss of both sides. The trusted process finds it by a trial of the model."""
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


# The sum of two parts is the same in both orders. With more ranks, DistributedDataParallel changes the
# order of summation after its first step, and so does a resumed run.
MOST_IN_ANY_ORDER = 2


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
    python: Path | None = None
    """Interpreter of the environment in which the candidate runs; None for this one."""
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
    recorded: Path | None = None
    """The golden of an earlier check; None to record one."""
    golden: Path = Path()
    folder: Path = Path()
    """The folder that a process writes into: the golden, or the candidate's."""

    @property
    def dtype(self) -> str:
        """The candidate's dtype."""
        return parse_run(self.candidate).dtype


@dataclass(frozen=True, slots=True, order=True)
class StateValue:
    """The address of one value in a trainer's state."""

    path: str
    """The full path, as a verdict names it."""
    part: str
    """One of "model", "moments", "optimizer", "generators", or a key that the trainer adds."""
    parameter: str | None = None
    """Name of the parameter or buffer in the unwrapped model; None for any other value."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a parameter, or of one of its optimizer moments, that a rank holds."""

    parameter: str
    moment: str | None = None
    """Name of the moment; None for the parameter itself."""
    coordinates: tuple[tuple[int, int], ...] = ()
    """Number of each mesh axis that divides the value, and the rank's place on that axis.

    Ranks with equal coordinates hold the same part.
    """

    def __str__(self) -> str:
        name = self.parameter if self.moment is None else f"{self.parameter} {self.moment}"
        return name + "".join(f"|{axis}={place}" for axis, place in self.coordinates)


class TrajectoryRecord(Record):
    """The distance of a parameter at the end of a free run from its recorded end."""

    parameter: str
    error: Number
    """Median over the elements of the absolute difference."""
    size: Number
    """Median absolute value at the end of the recorded steps."""


@dataclass(frozen=True, slots=True)
class KeptPrecision:
    """Names of parameters and moments that are kept in a dtype narrower than float32."""

    parameters: list[str] = field(default_factory=list)
    """Trained parameters without a wider copy in the optimizer."""
    copied: list[str] = field(default_factory=list)
    """Trained parameters with a wider copy in the optimizer."""
    moments: list[str] = field(default_factory=list)
    """Name of the parameter and of the moment, with a space between."""
    rounded: list[str] = field(default_factory=list)
    """Float32 parameters that are rounded between two steps; `rounded_weights` finds them."""


@dataclass(slots=True)
class MovedElements:
    """Counts of parameter elements that updates change."""

    num_expected: int = 0
    """Elements that the reference's updates change."""
    num_moved: int = 0
    """Those of them that updates here change too."""


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


class LossCurve(Record):
    """Losses in nats per label token, and gradient norms before clipping, by step."""

    losses: list[Number] = Field(default_factory=list)
    grad_norms: list[Number] = Field(default_factory=list)
    first_step: int = 0

    @classmethod
    def of(cls, steps: Sequence[StepReport | StepRecord], first_step: int = 0) -> Self:
        """Return the curve of `steps`, numbered from `first_step`."""
        return cls(
            losses=[float(step.loss) for step in steps],
            grad_norms=[float(step.grad_norm) for step in steps],
            first_step=first_step,
        )

    @property
    def observed_norms(self) -> list[float]:
        """Return the gradient norms, or none if the trainer does not observe them.

        Then all norms are NaN, and no loss is: NaN in a gradient spoils the loss of the next step.
        """
        is_hidden = all(map(math.isnan, self.grad_norms)) and not any(map(math.isnan, self.losses))
        return [] if is_hidden else self.grad_norms


class RecordedPlan(Record):
    """The plan of a golden, which every candidate that is checked against it follows."""

    options: TrainOptions
    dtype: str
    """The candidate's."""
    reference: str
    """The trusted run."""
    environment: dict[str, Any]
    """Provenance of the trusted process."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Those of `record_settings`; older goldens have none."""


class ReferenceReport(Record):
    """The answer of the trusted process, in addition to the files of the golden."""

    plan: RecordedPlan | None = None
    """None of a golden that no other check can use."""
    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick: LossCurve
    """Of the recorded steps, between which the state is rounded to the candidate's dtype."""
    noise: LossCurve
    """Of the free noise run."""
    noise_trajectory: list[TrajectoryRecord]
    num_tokens: list[int]
    num_rows: list[list[int]]
    """Rows of each micro-batch of each step."""
    num_trainable: int
    shared: list[list[str]]
    draws: bool = False
    """True if training draws random numbers, for dropout for example."""
    other_loss: str = ""
    """Difference of the model's own loss from that of both sides; the level `loss` then cannot pass."""
    load: LoadReport | None = None
    usage: Usage = Field(default_factory=Usage)
    untouched: list[str] = Field(default_factory=list)
    """Trained parameters without gradient in any step."""
    notes: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GradientShare:
    """Multiplicity of one part in the sum of a step's gradients; 1 is right."""

    step: int
    source: int
    """Number of the micro-batch or rank that the part comes from."""
    share: Number


@dataclass(frozen=True, slots=True)
class KeptGradients:
    """Gradients of the step before that are part of a step's gradients."""

    step: int
    share: Number
    """Their weight in the sum; 0 is right."""
    parameters: list[str]


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Global norms of the gradients of one process after a phase."""

    step: int
    phase: Phase
    first: Number
    """After the first micro-batch of the step; nan if it is not visible, or gradients are sharded."""
    found: Number
    """As the phase left the gradients."""
    injected: Number
    """As the next phase gets them."""


@dataclass
class GradientFindings:
    """Gradients of the parameters in the replayed steps."""

    drew_in_backward: bool = False
    """True if a backward pass changed the state of the generator."""
    errors_of_sums: dict[str, Number] = field(default_factory=dict)
    """By parameter the largest error of a step's sum, relative to the root of the summed squares.

    Sharded parameters are missing: autograd computes gradients for their gathered copies.
    """
    changed: dict[str, Number] = field(default_factory=dict)
    """By parameter the largest relative change of `.grad` between the last pass and the next phase."""
    kept: list[KeptGradients] = field(default_factory=list)
    """Steps whose first backward pass found gradients of the step before."""
    sharded_gradients: int = 0
    """Nonzero gradient elements of sharded parameters."""
    narrow_gradients: int = 0
    """Those of them that are exact in the compute dtype, which is rare for sums of several values."""
    shares: list[GradientShare] = field(default_factory=list)
    """Weight of each micro-batch of this process in the gradients of its step; 1 if correct."""
    rank_shares: list[GradientShare] = field(default_factory=list)
    """Weight of each rank's part in the reduced gradients; 1 if correct."""
    norms: list[GradientNorm] = field(default_factory=list)


@dataclass
class ReplayFindings:
    """Calls, losses and steps of the replay."""

    seen: set[Phase] = field(default_factory=set)
    """Phases whose method was called, or whose result the optimizer's step shows."""
    hidden: dict[Phase, str] = field(default_factory=dict)
    """Phases whose method was called without showing its result, each with the reason."""
    micro_batches_run: list[tuple[int, int]] = field(default_factory=list)
    """Step and number of each micro-batch of this process."""
    clipped_early: list[int] = field(default_factory=list)
    """Steps in which a micro-batch began after the gradients were clipped."""
    packed: list[tuple[int, ...]] = field(default_factory=list)
    """Numbers of micro-batches that were run as one."""
    unapplied: list[str] = field(default_factory=list)
    """Requested features without effect; see `assay.training.processes.candidate.find_unapplied`."""
    not_loaded: list[StateValue] = field(default_factory=list)
    """Values that the trainer's `load_state_dict` ignores."""
    changed_by_skipping: list[StateValue] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    logit_gradients: "list[GradientScale]" = field(default_factory=list)
    labels: "list[LabelDifference]" = field(default_factory=list)
    scaled_steps: "list[ScaledStep]" = field(default_factory=list)
    """Steps of the second replay, with the loss scale divided out; empty without such a replay."""


@dataclass(slots=True)
class FreeRun:
    """A run without injection, with a checkpoint in the middle, and its resumption from there."""

    steps: list[StepRecord] = field(default_factory=list)
    resumed: list[StepRecord] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    """Tensors that differ between the model and the model folder of its checkpoint."""
    settings: list[str] = field(default_factory=list)
    """Settings that differ between the model's configuration and that of the model folder."""
    changed_by_saving: list[StateValue] = field(default_factory=list)
    ended_otherwise: list[str] = field(default_factory=list)
    """Values after the last step that differ between the resumed and the uninterrupted run."""
    masks: list[str] = field(default_factory=list)
    """For each micro-batch, a hash of the generator's state at its first dropout mask."""
    trajectory: list[TrajectoryRecord] = field(default_factory=list)
    resumed_trajectory: list[TrajectoryRecord] = field(default_factory=list)
    not_restored: list[StateValue] = field(default_factory=list)
    """Loaded values that differ from the saved ones, and drawn generators that the state lacks."""
    compared: int = 0
    """Number of values checked for `not_restored`."""
    saved_compared: int = 0
    problem: str | None = None
    """Why the checkpoint could not be written or read."""
    notes: list[str] = field(default_factory=list)
    generators_compared: bool = False
    """True if the saved state includes the random number generators."""
    held: list[list[tuple[HeldPart, str]]] = field(default_factory=list)
    """After each step, the hash of each part of a parameter or moment that this rank holds."""
    kept: KeptPrecision | None = None
    """None without mixed precision."""


@dataclass(slots=True)
class ModelReport:
    """Model and optimizer, compared with the reference's: before the first step, and what is trained."""

    load: LoadReport | None = None
    """Findings of this process from loading the model without a trainer."""
    weights_different: list[str] = field(default_factory=list)
    changes: SetupChanges = field(default_factory=SetupChanges)
    """By how much `weights_different` differ."""
    adapter_start: list[str] = field(default_factory=list)
    """Adapter parameters with implausible initial values."""
    shared: list[list[str]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Parameters and buffers of the model that this process does not hold."""
    not_in_optimizer: list[str] = field(default_factory=list)
    """Parameters that the reference trains and this optimizer does not hold."""
    frozen: list[str] = field(default_factory=list)
    """Parameters that the reference trains and that have `requires_grad=False` here."""
    unexpectedly_trained: list[str] = field(default_factory=list)
    """Parameters that this optimizer changes and the reference does not train."""
    moved: MovedElements = field(default_factory=MovedElements)


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The answer of the candidate's process, in addition to the files with its measurements."""

    run: dict[str, Any]
    free: FreeRun
    coordinates: dict[str, int] = field(default_factory=dict)
    """Of this process on the mesh."""
    traits: TrainerTraits = field(default_factory=TrainerTraits)
    """Declared by the trainer, or by its lack of a method, without the layout."""
    model: ModelReport = field(default_factory=ModelReport)
    replay: ReplayFindings = field(default_factory=ReplayFindings)
    gradients: GradientFindings = field(default_factory=GradientFindings)


# Folder of the candidate's trained weights, below the folder that the candidate writes to.
TRAINED = "trained"


class Memorization(Record):
    """Prediction of the sequences by trained weights, measured on the trusted device."""

    nats: dict[str, Number] = Field(default_factory=dict)
    """Mean loss per token of each kind in `assay.training.overfit.sides.KINDS`.

    Empty if the weights do not fit the model.
    """
    missing: list[str] = Field(default_factory=list)


class OverfitReference(Record):
    """The answer of the trusted process: yardstick and noise run."""

    model: dict[str, Any]
    reference: dict[str, Any]
    yardstick: LossCurve
    noise: LossCurve
    memorization: Memorization
    num_tokens: int
    trainable: list[str]
    moved: list[str]
    """Parameters of which the noise run changed most elements."""
    touched: list[str]
    """Parameters of which the noise run changed any element."""
    usage: Usage
    """Parts of the model that predicting the sequences uses."""
    draws: bool = False
    """True if training draws random numbers, for dropout for example."""


class OverfitCandidate(Record):
    """The answer of the candidate, or of one of its ranks."""

    run: dict[str, Any]
    curve: LossCurve
    num_tokens: list[int]
    unmoved: list[str]
    """Parameters of this rank that kept every bit."""
    touched: list[str]
    weights_different: list[str] = Field(default_factory=list)
