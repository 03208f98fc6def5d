"""What a trainer is: the plan that it gets, the report that it gives, the calls between."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from assay.models.remote_code import RemoteCode

if TYPE_CHECKING:
    import torch


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
    remote_code: RemoteCode = "refuse"


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
