"""Stages: the pieces of a run that are re-run from the reference's inputs and judged alike.

In the forward pass a stage is the code of one module outside of its children: what a module
hands to a child was made by the module, what the child returns was made by the child. Fed the
reference's values at every one of these borders, an error stays in the stage that makes it.
Training adds stages of the other phases; a trainer says which of them can be observed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from assay.sites import Call, Phase

if TYPE_CHECKING:
    import torch

# What a stage, and what comes out of the model, is judged by; `assay.noise` says how.
Statistic = Literal[
    "replay-tensor", "replay-row", "replay-slope", "replay-bins", "replay-channel", "replay-share",
    "replay-row-slope",
    "exact", "non-finite",
    "logits-kl", "logits-kl-worst", "logits-error", "logits-worst", "loss-error",
    "course-error",
]  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """The code of `module` in `phase`, outside of its children."""

    module: str
    phase: Phase = "forward"

    def __str__(self) -> str:
        return self.module or "(model)"


def stage_that_made(call: Call, port: str) -> Stage:
    """The stage whose code computed the tensor at `port` of `call`.

    An input was made by the caller's code, for the root call by the generation loop
    (phase `inputs`); an output or a changed argument by the called module's own code.
    Gradients go the other way: that of an input was made by the called module's own code, that
    of an output by the caller's, of the root call's output by the loss (the model's own stage).
    """
    if call.site.phase == "backward":
        made_here = port.startswith("input.") or call.caller is None
        return Stage(call.site.module if made_here else call.caller or "", "backward")
    if not port.startswith("input."):
        return Stage(call.site.module, call.site.phase)
    if call.caller is None:
        return Stage(call.site.module, "inputs")
    return Stage(call.caller, call.site.phase)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a trainer is to do: enough to build the same run on any device and mesh.

    setup: FILE.py:FUNC to be called with the loaded model before anything is built around it.
    remote_code: whether code that comes with the model may run.
    """

    model: str
    run: str
    steps: int = 3
    micro_batches: int = 2
    resume_at: int | None = None
    seed: int = 0
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    mesh: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    setup: str | None = None
    adapter_dropout: float = 0.1
    remote_code: Literal["refuse", "trust"] = "refuse"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step says of itself.

    loss: mean over the unmasked label tokens of the whole step, nats.
    grad_norm: global norm before clipping; nan where the trainer cannot observe it.
    """

    step: int
    loss: float
    num_tokens: int
    grad_norm: float
    learning_rate: float


class Trainer(Protocol):
    """One way to train a model for a few steps; see the contract for the meaning of each call."""

    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"

    def setup(self, plan: TrainingPlan) -> None:
        """Build what `plan` asks for."""

    def step(self, batch: Any) -> StepReport:  # noqa: ANN401 - micro-batches of any trainer
        """One optimizer step on `batch`."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint from which `load` resumes."""

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote."""

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and random-number states, whole and unsharded."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""

    def teardown(self) -> None:
        """Give back devices and process groups."""
