"""The answer of the candidate's process, or of one of its ranks, as JSON."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from assay.comparing.coverage import Usage
from assay.locating.label_gradients import LabelDifference
from assay.locating.loss_scale import GradientScale, ScaledStep
from assay.models.loaded.report import LoadReport, SetupChanges
from assay.training.processes.requests import StepRecord
from assay.training.replay.observing.gradient_sums import GradientShare, KeptGradients
from assay.training.replay.observing.observed_gradients import GradientNorm
from assay.training.replay.observing.step_observer import StepObserver
from assay.training.replay.observing.update_watch import MovedElements
from assay.training.state.precision import KeptPrecision
from assay.training.state.records import HeldPart, StateValue, TrajectoryRecord
from assay.training.trainers.registry import OpenedTrainer
from assay.verdicts import Number, Record


class FreeRun(Record):
    """A run without injection, with a checkpoint in the middle, and its resumption from there."""

    steps: list[StepRecord] = Field(default_factory=list)
    resumed: list[StepRecord] = Field(default_factory=list)
    saved: list[str] = Field(default_factory=list)
    """Tensors that differ between the model and the model folder of its checkpoint."""
    settings: list[str] = Field(default_factory=list)
    """Settings that differ between the model's configuration and that of the model folder."""
    changed_by_saving: list[StateValue] = Field(default_factory=list)
    ended_otherwise: list[str] = Field(default_factory=list)
    """Values after the last step that differ between the resumed and the uninterrupted run."""
    masks: list[str] = Field(default_factory=list)
    """For each micro-batch, a hash of the generator's state at its first dropout mask."""
    trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    resumed_trajectory: list[TrajectoryRecord] = Field(default_factory=list)
    not_restored: list[StateValue] = Field(default_factory=list)
    """Loaded values that differ from the saved ones, and drawn generators that the state lacks."""
    compared: int = 0
    """Number of values checked for `not_restored`."""
    saved_compared: int = 0
    problem: str | None = None
    """Why the checkpoint could not be written or read."""
    notes: list[str] = Field(default_factory=list)
    generators_compared: bool = False
    """True if the saved state includes the random number generators."""
    held: list[list[tuple[HeldPart, str]]] = Field(default_factory=list)
    """After each step, the hash of each part of a parameter or moment that this rank holds."""
    kept: KeptPrecision | None = None
    """None without mixed precision."""


@dataclass(frozen=True, slots=True)
class DeclaredTraits:
    """Traits that the trainer declares in `TrainerTraits`, or by lacking a method."""

    invisible: dict[str, str] = field(default_factory=dict)
    """Phases that cannot be observed, each with the reason."""
    partial_modules: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    dropout_masks: Literal["own", "shared"] | None = None
    inexact_resume: str | None = None
    update_rounding: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The model before its first step, compared with the reference's."""

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


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Calls and steps of the replay."""

    seen: list[str] = field(default_factory=list)
    """Phases whose method was called."""
    micro_batches_run: list[tuple[int, int]] = field(default_factory=list)
    """Step and number of each micro-batch."""
    packed: list[tuple[int, ...]] = field(default_factory=list)
    """Numbers of micro-batches that were run as one."""
    unapplied: list[str] = field(default_factory=list)
    """Requested features without effect; see `assay.training.processes.unapplied_features`."""
    not_loaded: list[StateValue] = field(default_factory=list)
    """Values that the trainer's `load_state_dict` ignores."""
    changed_by_skipping: list[StateValue] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class LossReport:
    """Scale and labels of the losses."""

    logit_gradients: list[GradientScale] = field(default_factory=list)
    labels: list[LabelDifference] = field(default_factory=list)
    scaled_steps: list[ScaledStep] = field(default_factory=list)
    """Steps of the second replay, with the loss scale divided out; empty without such a replay."""


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Gradients of the parameters in the replayed steps."""

    drew_in_backward: bool = False
    """True if a backward pass changed the state of the generator."""
    errors_of_sums: dict[str, Number] = field(default_factory=dict)
    """`GradientSums.errors`."""
    changed: dict[str, Number] = field(default_factory=dict)
    """`GradientSums.changed`."""
    kept: list[KeptGradients] = field(default_factory=list)
    """Steps whose first backward pass found gradients of the step before."""
    sharded_gradients: int = 0
    """`GradientSums.num_sharded`."""
    narrow_gradients: int = 0
    """`GradientSums.num_narrow`."""
    shares: list[GradientShare] = field(default_factory=list)
    """Weight of each micro-batch of this process in the gradients of its step; 1 if correct."""
    rank_shares: list[GradientShare] = field(default_factory=list)
    """Weight of each rank's part in the reduced gradients; 1 if correct."""
    norms: list[GradientNorm] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """Parameters that the optimizer holds and changes."""

    not_in_optimizer: list[str] = field(default_factory=list)
    """Parameters that the reference trains and this optimizer does not hold."""
    frozen: list[str] = field(default_factory=list)
    """Parameters that the reference trains and that have `requires_grad=False` here."""
    unexpectedly_trained: list[str] = field(default_factory=list)
    """Parameters that this optimizer changes and the reference does not train."""
    moved: MovedElements = field(default_factory=MovedElements)


class TrainerReport(Record):
    """The answer of the candidate's process, in addition to the files with its measurements."""

    run: dict[str, Any]
    free: FreeRun
    coordinates: dict[str, int] = Field(default_factory=dict)
    """Of this process on the mesh."""
    traits: DeclaredTraits = Field(default_factory=DeclaredTraits)
    model: ModelReport = Field(default_factory=ModelReport)
    replay: ReplayReport = Field(default_factory=ReplayReport)
    loss: LossReport = Field(default_factory=LossReport)
    gradients: GradientReport = Field(default_factory=GradientReport)
    optimizer: OptimizerReport = Field(default_factory=OptimizerReport)


def declared_traits(opened: OpenedTrainer, observer: StepObserver | None = None) -> DeclaredTraits:
    """Report what a trainer declares, and which phases its steps showed to `observer`."""
    traits = opened.traits
    seen, hidden = (observer.seen, observer.hidden) if observer else (set(), {})
    shown = seen - traits.invisible_phases.keys()
    return DeclaredTraits(
        invisible={k: v for k, v in opened.invisible_phases.items() if k not in shown} | hidden,
        partial_modules=sorted(traits.partial_modules),
        unmeasured=sorted(
            f"{module or '(model)'}:{port}" for module, port in traits.unmeasured_ports
        ),
        dropout_masks=traits.dropout_masks,
        inexact_resume=traits.inexact_resume,
        update_rounding=traits.update_rounding,
        notes=list(traits.notes),
    )
