"""The interface of a trainer: its plan, its methods, its reports.

A trainer must implement `Trainer`. The optional methods of `ObservableTrainer` let a check find the
wrong phase of a step. docs/training.md has an example of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from assay.dtypes import float_format
from assay.models.sources import RemoteCode
from assay.sites import Phase

if TYPE_CHECKING:
    import torch

    from assay.replay.ports import RankLayout


# `input_ids`, `attention_mask` and `labels`, each (B, T) in int64. Other models than decoders of text have the
# arguments of their forward call, among them `labels`.
MicroBatch = Mapping[str, "torch.Tensor"]

# The loss of a decoder: its labels are its input ids, not shifted, and it predicts the next one.
NEXT_TOKEN = "next-token"  # noqa: S105 - no password

# The method of an ObservableTrainer for each phase, in the order of a step.
PHASE_METHODS: Mapping[Phase, str] = {
    "forward": "compute_loss",
    "backward": "backward",
    "reduce": "reduce_gradients",
    "clip": "clip_gradients",
    "optimizer": "optimizer_step",
}

# AdamW adds it to the root of the second moment, its divisor. Source: torch.optim.AdamW.
ADAMW_EPS = 1e-8

# Settings of AdamW, with torch's defaults, that a plan states for groups of parameters; and "lr".
ADAMW_SETTINGS: Mapping[str, Any] = {
    "betas": (0.9, 0.999), "eps": ADAMW_EPS, "weight_decay": 0.01,
}  # fmt: skip

# Optional attribute of a trainer's class: fields of the plan that the trainer states for both sides.
STATED_PLAN = "stated_plan"
STATED_FIELDS = frozenset({"learning_rate_factors", "parameter_groups", "max_grad_norm", "frozen"})

# Features of a plan.
# Keep parameters (or a copy of each in the optimizer), gradient sums and moments in float32, and compute
# in the run's dtype.
MIXED_PRECISION = "mixed-precision"
# Multiply the loss by a scale, and divide the gradients by it before they are clipped: small gradients
# are zero in float16. Skip steps whose gradients overflow.
LOSS_SCALING = "loss-scaling"
# Pack the rows of a rank's micro-batches into one row without padding.
PACKED = "packed"
# Compile every decoder layer.
COMPILE = "compile"

# The method of a pipeline that runs forward and backward of all micro-batches of a step.
SCHEDULE_METHOD = "run_schedule"


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """A value of a setting of AdamW that differs from the stated one of `TrainingPlan.parameter_groups`."""

    parameters: str
    """The GLOB of their names."""
    name: str
    value: float

    @classmethod
    def instead(cls, parameters: str, name: str, stated: object) -> "OtherSetting | None":
        """Return what an optimizer has that ignores the stated weight decay or eps; None for others."""
        if name not in ("weight_decay", "eps"):
            return None
        ignored = 0.0 if name == "weight_decay" and stated else ADAMW_SETTINGS[name]
        return None if ignored == stated else cls(parameters, name, ignored)


def can_keep_moments(dtype: str) -> bool:
    """Return True if AdamW works in `dtype`; in float16 eps and squares of small gradients are 0."""
    return float_format(dtype).smallest <= ADAMW_EPS


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The run that a trainer builds, on any device and mesh."""

    model: str
    """A Hugging Face folder, a hub name or a recipe such as `micro:llama`.

    `assay.models.load_model(plan.model, dtype=..., device=...).model` loads all three.
    """
    run: str
    """Device and dtype, such as `cpu/bfloat16`; parameters are kept in this dtype."""
    steps: int = 3
    micro_batches: int = 2
    """Micro-batches of each step, over all ranks."""
    resume_at: int | None = None
    """Number of steps before the checkpoint to resume from; None: no checkpoint."""
    seed: int = 0
    learning_rate: float = 1e-3
    """Learning rate of AdamW; its other settings are torch's defaults."""
    learning_rate_factors: Sequence[float] = ()
    """Factor of all learning rates in each step, the last one for all later steps; empty: 1."""
    parameter_groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other settings of AdamW, as `{"*norm*": {"weight_decay": 0.0}}`, by GLOB of parameter names.

    Of several GLOBs that fit, the first with a setting counts. Settings are `lr`, `betas`, `eps` and `weight_decay`.
    """
    max_grad_norm: float = 1.0
    """Largest global norm of the gradients; inf does not clip."""
    loss: str = NEXT_TOKEN
    """Name of the loss in `assay.training.losses`, which the model's own loss follows.

    `count_label_tokens(micro_batch, plan.loss)` counts its labels.
    """
    frozen: Sequence[str] = ()
    """GLOBs of the names of parameters that are not trained."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks of each axis, such as {"dp": 2}; empty for a single process."""
    features: frozenset[str] = frozenset()
    """Requested features: `lora`, `recompute`, `cpu-offload`, `mixed-precision`, `loss-scaling`,
    `packed`, `compile`. A trainer raises an error for features that it does not support.
    """
    setup: str | None = None
    """FILE.py:FUNC, to call with the loaded model before anything is built around it.

    `assay.training.set_up(model, plan.setup)` calls it.
    """
    adapter_dropout: float = 0.1
    remote_code: RemoteCode = "refuse"

    def settings_of(self, parameter: str, step: int) -> dict[str, Any]:
        """Return the settings of AdamW for a parameter in `step`, from 0."""
        settings: dict[str, Any] = {"lr": self.learning_rate, **ADAMW_SETTINGS}
        for glob, own in reversed(list(self.parameter_groups.items())):
            settings |= own if fnmatchcase(parameter, glob) else {}
        factors = self.learning_rate_factors or (1.0,)
        return settings | {"lr": settings["lr"] * factors[min(step, len(factors) - 1)]}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The numbers of one optimizer step, as the trainer reports them."""

    step: int
    """Number of the step, from 0; a resumed trainer continues to count."""
    loss: float
    """Mean over the unmasked label tokens of the whole step and all ranks, in nats."""
    num_tokens: int
    """Number of these label tokens; the first token of a row is not a label."""
    grad_norm: float
    """Global norm before clipping; nan if the trainer cannot observe it."""
    learning_rate: float
    skipped: bool = False
    """True on all ranks if the optimizer did not run, as GradScaler does if gradients overflow.

    Then only the loss scale may have changed. A check repeats the batch until the step is made.
    """


@dataclass(frozen=True, slots=True)
class TrainerTraits:
    """Declared peculiarities of a trainer; all are optional."""

    invisible_phases: Mapping[Phase, str] = field(default_factory=dict)
    """Phases whose method does not show their result, each with the reason.

    Example: `{"reduce": "FSDP2 adds gradients up inside of backward"}`. The result is compared after
    the next visible phase. A phase without a method needs no entry.
    """
    partial_modules: frozenset[str] = frozenset()
    """Paths of modules of which this rank has only some children.

    In a pipeline these are the model itself ("") and its body ("model").
    """
    unmeasured_ports: frozenset[tuple[str, str]] = frozenset()
    """Module path and port of inputs and outputs with other values than in the whole model, or none.

    They must not affect the result. Example: `("", "output.logits")` if the loss is fused with the head.
    """
    layout: "RankLayout | None" = None
    """Layout of this rank's local tensors at module boundaries; None if they are whole or DTensors."""
    dropout_masks: Literal["own", "shared"] | None = None
    """Masks of the ranks of dp: "own" if equal masks are an error, "shared" if they are intended.

    If None, equal masks are a note.
    """
    scheduled_module: str | None = None
    """Path in `model` ("" for `model` itself) of the module that `run_schedule` calls.

    It is called once for each micro-batch. None if micro-batches go through `compute_loss` and
    `backward`.
    """
    inexact_resume: str | None = None
    """Reason why a resumed run differs in its last bits, such as a library's rounding after a restart.

    Then only the first resumed loss is compared bitwise, and later values are judged by their noise.
    """
    update_rounding: float = 0.0
    """Relative error of updates and moments from the optimizer's arithmetic, compared with torch's.

    An example is betas kept in float32. The verdict reports it, as smaller errors are not seen.
    """
    notes: tuple[str, ...] = ()


class Trainer(Protocol):
    """A way to train a model for a few steps.

    It is constructed without arguments, and `setup` is called once, before anything else. A check
    opens several trainers of one class in one process, one after the other:

    1. free run: `load_state_dict`, then `step` for every batch, with a `save` after
       `plan.resume_at` steps, and one a step earlier if that is not the start, then `teardown`;
    2. resumed run: `load` the last checkpoint, `step` for the remaining batches, `teardown`;
    3. replay: `load_state_dict` before every `step`, then `teardown`.

    On several ranks each rank has its own trainer. Every method is called on all ranks in the same
    order, so that it may be collective. torch.distributed is already initialized.

    A class may have an attribute `pipeline_shapes`, the micro-batch shapes that its pipelines accept:
    "equal-first-step" if micro-batches of later steps may differ in rows and tokens; by default
    "equal", if all micro-batches of a step have one shape. A verdict notes the latter, because a
    check then misses a stage that loses its gradients when it is rebuilt for another shape.

    An attribute `stated_plan` holds fields of the plan that the trainer states, for the reference too:
    `learning_rate_factors`, `parameter_groups` and `max_grad_norm`.
    """

    model: "torch.nn.Module"
    """The trained model, after `setup`: the optimizer changes its parameters, and its modules run.

    Prefixes of names from wrappers such as DistributedDataParallel and torch.compile are removed.
    """
    optimizer: "torch.optim.Optimizer"
    """An optimizer over the trained parameters, after `setup`."""

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer for `plan` on its device, and seed the generators.

        Called once, on a fresh trainer. Raise an exception for anything in `plan` that the trainer
        does not support.
        """

    def step(self, batch: "Sequence[MicroBatch]") -> StepReport:
        """Make one optimizer step, with gradients accumulated over the micro-batches of `batch`.

        The gradients that the optimizer used stay in `.grad` until the next step begins.

        Args:
            batch: micro-batches, each a mapping with `input_ids`, `attention_mask` and `labels`:
                tensors of shape (B, T), int64, on the host. B and T differ between micro-batches,
                in a pipeline according to `pipeline_shapes`. Rows are padded on the right or on the
                left, where `attention_mask` is 0. `labels` are the token ids at the same positions,
                not shifted; a label of -100 (prompt, padding) does not count. Models other than
                decoders of text have other arguments and labels: those of `model(**micro_batch)`,
                whose loss is the mean over the labels of `plan.loss`. The tensors are copies,
                which a step may change. Every rank gets the whole batch, and trains on its
                own share.

        Returns: the numbers of the whole step, equal on all ranks.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint from which a fresh trainer resumes by `load`.

        Called between two steps, possibly twice; the last checkpoint is resumed from. Saving must not
        change anything that the next step depends on. If the checkpoint has a folder `model`, it is
        loaded as users would load it (a Hugging Face folder, with `lora` the folder of a peft adapter)
        and compared with `model`.

        Args:
            folder: does not exist yet; the same path on all ranks.
        """

    def load(self, folder: Path) -> None:
        """Restore the checkpoint in `folder`: model, optimizer, generators, step count.

        Called once, on another trainer after its `setup`. The following steps must be bitwise equal
        to those of the uninterrupted run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, whole and unsharded on every rank.

        In a pipeline this is the state of the rank's own stage. Called between steps, without side
        effects.

        Returns: nested dictionaries, lists and tuples, with these keys:

            model: parameters and buffers, named as in `model.state_dict()`.
            optimizer: as in `optimizer.state_dict()`: `state` by number of the parameter, with
                whole tensors, and `param_groups`.
            generators: states of the random number generators by name: `python`, `numpy`, `torch`
                (the host's) and `device`. Only generators that training draws from are needed, and
                `load` and `load_state_dict` have to restore all that are here.
                `assay.training.generator_states` returns all four.

            Other keys, such as a step count, are up to the trainer.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` as if this trainer had just made the steps before it.

        Called between steps, also before the first one.

        Args:
            state: a result of `state_dict` with the reference's values in `model`,
                `optimizer["state"]` and `generators`, which has all generators of the machine. A
                trainer restores those that it needs; `assay.training.restore_generators` restores
                all.
        """

    def teardown(self) -> None:
        """Release model, optimizer, and other resources. Called last."""


class ObservableTrainer(Trainer, Protocol):
    """A trainer whose step calls one method for each phase, so that a check sees each phase.

    `step` calls these methods on `self`: for each micro-batch `compute_loss` and `backward`, then
    `reduce_gradients`, `clip_gradients` and `optimizer_step` once each. In a replay they are wrapped
    on the instance: each gets the reference's result of the previous phase, and its own result is
    compared. Look them up on `self` at each call, because a bound method stored in `setup` is not
    wrapped.

    Each method is optional. Without one, the verdict reports that the phase is not visible, and its
    result is compared after the next visible phase. Without `compute_loss`, each call of the model
    under autograd counts as one micro-batch, labels are not compared, and the verdict is at best
    NOT_COMPARED. This class documents signatures: to a type checker, a trainer that lacks one of them
    is only a `Trainer`.

    `setup` calls `build_model` and `build_optimizer`, which a check does not watch. Subclasses of
    ReferenceTrainer override them.
    """

    @property
    def traits(self) -> TrainerTraits:
        """Declared peculiarities of this trainer, read once after `setup`; an attribute will do."""
        return TrainerTraits()

    def build_model(self, plan: TrainingPlan) -> "torch.nn.Module":
        """Return the model of `plan` in training mode on its device, after `plan.setup`."""
        ...

    def build_optimizer(self, model: "torch.nn.Module") -> "torch.optim.Optimizer":
        """Return the optimizer over the trainable parameters of `model`."""
        ...

    def compute_loss(self, micro_batch: "MicroBatch", num_step_tokens: int) -> "torch.Tensor":
        """Run the forward pass of one micro-batch.

        Args:
            micro_batch: a micro-batch of `step`, on the model's device.
            num_step_tokens: number of unmasked label tokens of the whole step, on all ranks.

        Returns: one number with its graph, the sum of the token losses of the micro-batch, divided
            by `num_step_tokens`.
        """
        ...

    def backward(self, loss: "torch.Tensor") -> None:
        """Add the gradients of `loss`, a result of `compute_loss`, to `.grad`."""

    def reduce_gradients(self) -> None:
        """Sum `.grad` over the ranks that train on other micro-batches; without ranks, do nothing."""

    def clip_gradients(self, max_norm: float) -> float:
        """Scale `.grad` to a global norm of at most `max_norm`.

        Returns: the norm before, over the gradients of all ranks.
        """
        ...

    def optimizer_step(self) -> None:
        """Update the parameters from `.grad`."""


# Micro-batches of equal shape have equally many rows and tokens, padding included.
# unequal: none of a step; equal: all of a step; equal-first-step: all of the first step, and none of
# another step; equal-in-all-steps: all of a run.
Shapes = Literal["unequal", "equal-first-step", "equal", "equal-in-all-steps"]

EQUAL_IN_A_STEP: tuple[Shapes, ...] = ("equal", "equal-in-all-steps")

# Optional attribute of a trainer's class, by default "equal".
PIPELINE_SHAPES = "pipeline_shapes"

# The trainer `pipeline` has one schedule for all micro-batches of the first step, then one for each.
OF_NAMED_PIPELINES: Shapes = "equal-first-step"
