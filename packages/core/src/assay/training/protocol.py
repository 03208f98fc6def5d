"""What a trainer is: the plan that it gets, the calls that it answers, the report that it gives.

`Trainer` is what a trainer of one's own has to have, `ObservableTrainer` what it can have beyond it,
so that a check finds the phase of a step that is wrong. An example of both: docs/training.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from assay.dtypes import float_format
from assay.models.remote_code import RemoteCode
from assay.sites import Phase

if TYPE_CHECKING:
    import torch

    from assay.locating.matching.rank_layout import RankLayout
    from assay.training.batches import MicroBatch

# The method of an ObservableTrainer in which each phase of a step happens, in their order.
PHASE_METHODS: Mapping[Phase, str] = {
    "forward": "compute_loss",
    "backward": "backward",
    "reduce": "reduce_gradients",
    "clip": "clip_gradients",
    "optimizer": "optimizer_step",
}

# The feature of a plan by which a trainer keeps in float32 what it trains: its parameters, or a copy of
# each in the optimizer, the sums of their gradients, and the moments. It computes in the run's dtype.
MIXED_PRECISION = "mixed-precision"

# What AdamW adds to the root of the second moment, which it divides by. Source: torch.optim.AdamW.
ADAMW_EPS = 1e-8

# The feature of a plan by which the loss is multiplied by a scale, which is taken off the gradients before
# they are clipped: the smallest of them are zero in float16. Steps whose gradients overflow are skipped.
LOSS_SCALING = "loss-scaling"

# The feature of a plan by which the rows of a rank's micro-batches are one row without padding.
PACKED = "packed"

# The feature of a plan by which every decoder layer is compiled.
COMPILE = "compile"

# The method of a pipeline that runs forward and backward of all micro-batches of a step.
SCHEDULE_METHOD = "run_schedule"


def can_keep_moments(dtype: str) -> bool:
    """Whether AdamW works in `dtype`: in float16 its eps is 0, and so are squares of small gradients."""
    return float_format(dtype).smallest <= ADAMW_EPS


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a trainer is to do: enough to build the same run on any device and mesh.

    model: a Hugging Face folder, a hub name or a recipe such as `micro:llama`;
        `assay.models.load_model(plan.model, dtype=..., device=...).model` loads all three.
    run: device and dtype, as in `cpu/bfloat16`; parameters are kept in this dtype.
    steps: how many optimizer steps are trained.
    micro_batches: how many micro-batches each step has, over all ranks.
    resume_at: after how many steps a checkpoint is saved and resumed from; None: there is none.
    seed: of every generator that the training draws from.
    learning_rate: of AdamW with the defaults of torch, constant over the steps.
    max_grad_norm: the global gradient norm to which gradients are clipped.
    mesh: how many ranks each axis has, such as {"dp": 2}; empty for a single process.
    features: what is asked for beyond plain training: `lora`, `recompute`, `cpu-offload`,
        `mixed-precision` (see MIXED_PRECISION), `loss-scaling`, `packed`, `compile`. A trainer raises
        for those that it does not know.
    setup: FILE.py:FUNC to be called with the loaded model before anything is built around it, by
        `assay.training.set_up(model, plan.setup)`; None: nothing is to be called.
    adapter_dropout: of the adapter where `features` has `lora`.
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
    """The numbers of one optimizer step, as the trainer reports them.

    step: its number, from 0; a resumed trainer goes on counting.
    loss: mean over the unmasked label tokens of the whole step, of all ranks, in nats.
    num_tokens: how many label tokens these are; the first token of a row is no label.
    grad_norm: global norm before clipping; nan where the trainer cannot observe it.
    learning_rate: the one that the step was made with.
    skipped: whether the optimizer was left out, as under GradScaler where gradients overflow. Then
        nothing but the loss scale may have changed; a check gives the same batch again, until the
        step is made. Alike on all ranks.
    """

    step: int
    loss: float
    num_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class TrainerTraits:
    """What is special about a trainer; a trainer without any of it declares nothing.

    invisible_phases: phases whose method does not show their result, each with the reason:
        `{"reduce": "FSDP2 adds gradients up inside of backward"}`. Their result is compared after
        the next visible phase. A phase without a method needs no entry.
    partial_modules: paths of modules of which this rank has only some children, as every stage of
        a pipeline has of the model itself ("") and its body ("model").
    unmeasured_ports: (module path, port) of inputs and outputs at which the modules of this rank
        get other values than those of the whole model, without any effect on the result, or have
        none: `("", "output.logits")` where the loss is computed together with the head.
    layout: what whole tensors this rank's local tensors at module boundaries are parts of; None
        where they are whole, or DTensors.
    dropout_masks: "own" where ranks of dp are to draw masks of dropout each by itself, so that equal
        ones are a failure; "shared" where all are to drop alike; None leaves it open, and equal ones
        are a note.
    scheduled_module: path in `model` ("" is `model` itself) of the module that `run_schedule` calls
        once for each micro-batch; None for a trainer whose micro-batches go through `compute_loss`
        and `backward`.
    inexact_resume: why a resumed run is not the uninterrupted one to the last bit, where another library
        rounds otherwise after a restart: of its steps the first loss is compared bitwise, and what
        follows is judged by its noise.
    update_rounding: the relative error that its optimizer's arithmetic gives whole updates and moments
        beside torch's, as betas kept in float32 do; 0 where it gives none. The verdict names it: a
        smaller error of an update is not seen.
    notes: what a verdict should say of it, such as how its layers are compiled.
    """

    invisible_phases: Mapping[Phase, str] = field(default_factory=dict)
    partial_modules: frozenset[str] = frozenset()
    unmeasured_ports: frozenset[tuple[str, str]] = frozenset()
    layout: "RankLayout | None" = None
    dropout_masks: Literal["own", "shared"] | None = None
    scheduled_module: str | None = None
    inexact_resume: str | None = None
    update_rounding: float = 0.0
    notes: tuple[str, ...] = ()


class Trainer(Protocol):
    """One way to train a model for a few steps: what every trainer has.

    It is constructed without arguments, and `setup` is called once, before anything else. A check
    opens several trainers of one class, one after the other, in one process:

    1. free run: `load_state_dict`, then `step` for every batch, with a `save` after
       `plan.resume_at` steps, and one a step earlier if that is not the start, then `teardown`;
    2. resumed run: `load` what the first one saved last, `step` for the rest, `teardown`;
    3. replay: before every `step` a `load_state_dict`, then `teardown`.

    On several ranks each has a trainer of its own, and every method is called on all ranks in the
    same order, so that it may be collective. torch.distributed is initialized before.

    model: the model that is trained, after `setup`: its parameters are those that the optimizer
        changes, its modules are those that run. Wrappers that add prefixes to the names, as
        DistributedDataParallel and torch.compile do, are recognized.
    optimizer: a torch optimizer over the trained parameters, after `setup`.

    A class may have an attribute `pipeline_shapes`, of which micro-batches its pipelines take:
    "equal-first-step" if those of a step may differ in rows and tokens; "equal", as without it, if
    all of a step have one shape. A verdict notes the latter: a stage that loses its gradients where
    it is built anew for another shape is then not seen.
    """

    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer for `plan`, on its device, and seed what is drawn from.

        Called once, on a fresh trainer. What `plan` asks for and the trainer cannot do is an
        exception, not a silent difference.
        """

    def step(self, batch: "Sequence[MicroBatch]") -> StepReport:
        """Make one optimizer step; gradients are accumulated over the micro-batches of `batch`.

        The gradients, as the optimizer got them, stay in `.grad` until the next step begins.

        Args:
            batch: micro-batches, each a mapping with `input_ids`, `attention_mask` and `labels`:
                tensors of shape (B, T), int64, on the host. B and T differ between micro-batches,
                in a pipeline as `pipeline_shapes` says; rows are padded on the right or on the
                left, where `attention_mask` is 0. `labels` are the token ids at the same place,
                not shifted; a label of -100 (prompt, padding) does not count.
                They are copies: a step may change them. On several ranks every rank is given the
                whole batch and trains on its own share of it.

        Returns: the numbers of the whole step, alike on all ranks.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint from which a fresh trainer resumes by `load`.

        Called between two steps, more than once; the last one is resumed from. Nothing that the next step depends on may change by it. Where the
        checkpoint has a folder `model`, what is in it is loaded as users would load it (a Hugging
        Face folder; under `lora` the folder of a peft adapter) and compared with `model`.

        Args:
            folder: does not exist yet; on several ranks the same for all.
        """

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote into `folder`: model, optimizer, generators, step count.

        Called once, on another trainer after its `setup`. The steps that follow have to be
        bitwise equal to those of the run that was not interrupted.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, whole and unsharded on every rank.

        In a pipeline it is that of the rank's own stage. Called between steps; reading it changes
        nothing.

        Returns: a nested structure of dictionaries, lists and tuples, with these keys:

            model: the parameters and buffers, as `model.state_dict()` names them.
            optimizer: as `optimizer.state_dict()` has it: `state` by number of the parameter, with
                whole tensors, and `param_groups`.
            generators: states of the random number generators, each under its name: `python`,
                `numpy`, `torch` (the host's) and `device`. Only those that training draws from are
                needed; what is here has to be restored by `load` and `load_state_dict`.
                `assay.training.generator_states` makes all four.

            Other keys, such as a step count, are the trainer's own.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` as if this trainer had just made the steps that led to it.

        Called between steps, also before the first one.

        Args:
            state: what `state_dict` returned, with values of the reference in `model`,
                `optimizer["state"]` and `generators`. The generators are always all of those that
                the machine has: a trainer takes the ones that it needs;
                `assay.training.restore_generators` takes all.
        """

    def teardown(self) -> None:
        """Let go of model and optimizer, and of what else the trainer opened. Called last."""


class ObservableTrainer(Trainer, Protocol):
    """A trainer whose step is made of one method for each phase, so that a check sees each phase.

    `step` calls these methods on `self`: for each micro-batch `compute_loss` and `backward`, then
    `reduce_gradients`, `clip_gradients` and `optimizer_step`, each once. In a replay they are
    wrapped on the instance: what goes in is the reference's result of the phase before, what comes
    out is compared: look them up on `self` at each call, as a bound method that was kept in `setup` is
    the unwrapped one. Each of them is optional. Without one its phase is not observed; the verdict
    names it, and its result is compared after the next phase that is. Without `compute_loss` each
    call of the model under autograd counts as one micro-batch, its labels are not compared, and the
    verdict is at best NOT_COMPARED. This class documents signatures: to a type checker a trainer
    that lacks one of them is a `Trainer` only.

    `build_model` and `build_optimizer` are called by `setup`; a check does not watch them. They are
    named here as subclasses of ReferenceTrainer override them.
    """

    @property
    def traits(self) -> TrainerTraits:
        """What is special about this trainer. Read once, after `setup`; a plain attribute will do."""
        return TrainerTraits()

    def build_model(self, plan: TrainingPlan) -> "torch.nn.Module":
        """The model of `plan` in training mode on its device, after `plan.setup`."""
        ...

    def build_optimizer(self, model: "torch.nn.Module") -> "torch.optim.Optimizer":
        """The optimizer over the trainable parameters of `model`."""
        ...

    def compute_loss(self, micro_batch: "MicroBatch", num_step_tokens: int) -> "torch.Tensor":
        """Run the forward pass of one micro-batch.

        Args:
            micro_batch: one of those that `step` was given, on the model's device.
            num_step_tokens: the unmasked label tokens of the whole step, of all ranks.

        Returns: one number with its graph: the sum of the token losses of the micro-batch, divided
            by `num_step_tokens`.
        """
        ...

    def backward(self, loss: "torch.Tensor") -> None:
        """Add the gradients of `loss`, which is what `compute_loss` returned, to `.grad`."""

    def reduce_gradients(self) -> None:
        """Add up `.grad` over the ranks that train on other micro-batches; alone, do nothing."""

    def clip_gradients(self, max_norm: float) -> float:
        """Scale `.grad` so that the global norm is at most `max_norm`.

        Returns: the norm before, over the gradients of all ranks.
        """
        ...

    def optimizer_step(self) -> None:
        """Change the parameters by what `.grad` holds."""
