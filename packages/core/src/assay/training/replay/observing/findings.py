"""The findings of a replay in one process, which its observers write down as they see them."""

from dataclasses import dataclass, field

from assay.comparing.coverage import Usage
from assay.sites import Phase
from assay.training.state.records import StateValue
from assay.verdicts import Number


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
    """Calls and steps of the replay."""

    seen: set[Phase] = field(default_factory=set)
    """Phases whose method was called, or whose result the optimizer's step shows."""
    hidden: dict[Phase, str] = field(default_factory=dict)
    """Phases whose method was called without showing its result, each with the reason."""
    micro_batches_run: list[tuple[int, int]] = field(default_factory=list)
    """Step and number of each micro-batch of this process."""
    packed: list[tuple[int, ...]] = field(default_factory=list)
    """Numbers of micro-batches that were run as one."""
    unapplied: list[str] = field(default_factory=list)
    """Requested features without effect; see `assay.training.processes.unapplied_features`."""
    not_loaded: list[StateValue] = field(default_factory=list)
    """Values that the trainer's `load_state_dict` ignores."""
    changed_by_skipping: list[StateValue] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
