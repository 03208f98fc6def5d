"""The answer of the candidate's process, or of one of its ranks."""

from dataclasses import dataclass, field, replace
from typing import Any

from assay.locating.gradients import GradientScale, LabelDifference, ScaledStep
from assay.models.inspect.report import LoadReport, SetupChanges
from assay.training.processes.requests import StepRecord
from assay.training.protocol import TrainerTraits
from assay.training.replay.observing.findings import GradientFindings, ReplayFindings
from assay.training.replay.observing.update_watch import MovedElements
from assay.training.state.precision import KeptPrecision
from assay.training.state.records import HeldPart, StateValue, TrajectoryRecord
from assay.training.trainers.registry import OpenedTrainer


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
class LossReport:
    """Scale and labels of the losses."""

    logit_gradients: list[GradientScale] = field(default_factory=list)
    labels: list[LabelDifference] = field(default_factory=list)
    scaled_steps: list[ScaledStep] = field(default_factory=list)
    """Steps of the second replay, with the loss scale divided out; empty without such a replay."""


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
    loss: LossReport = field(default_factory=LossReport)
    gradients: GradientFindings = field(default_factory=GradientFindings)
    optimizer: OptimizerReport = field(default_factory=OptimizerReport)


def declared_traits(opened: OpenedTrainer, found: ReplayFindings | None = None) -> TrainerTraits:
    """Report what a trainer declares, and which phases its steps showed according to `found`."""
    found, declared = found or ReplayFindings(), opened.traits
    shown = found.seen - declared.invisible_phases.keys()
    hidden = {k: v for k, v in opened.invisible_phases.items() if k not in shown} | found.hidden
    return replace(
        declared,
        invisible_phases=hidden,
        partial_modules=frozenset(declared.partial_modules),
        unmeasured_ports=frozenset(declared.unmeasured_ports),
        layout=None,
        notes=tuple(declared.notes),
    )
