"""The reference trainer, without sharding or fusion."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from assay.devices.base import DeviceVendor
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.models import load_model
from assay.models.candidate_code import set_up
from assay.models.transformers_calls import save_pretrained
from assay.parallel.pipeline import decoder_layers
from assay.progress import counted
from assay.training.batches import check_batch, pack_rows
from assay.training.losses import LOSSES, add_losses
from assay.training.protocol import (
    COMPILE,
    LOSS_SCALING,
    MIXED_PRECISION,
    PACKED,
    MicroBatch,
    StepReport,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.state.files import read_state, write_state
from assay.training.state.parameters import named_parameters
from assay.training.state.states import generator_states, restore_generators
from assay.training.trainers.adapters import add_lora, load_adapter, save_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    """None without a mesh."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str) -> "MeshAxis":
        """Return the axis `name` of `mesh`, or an axis of size 1 if the mesh lacks it."""
        if mesh is None or name not in (mesh.mesh_dim_names or ()):
            return cls()
        return cls(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum `value` over the ranks of the axis, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value


def open_mesh(axes: Mapping[str, int], torch_device: str) -> DeviceMesh | None:
    """Open the mesh over all ranks; return None for a single process.

    Raises: UsageError if the number of ranks is another one.
    """
    num_ranks = prod(axes.values())
    if num_ranks == 1:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != num_ranks:
        mesh = ",".join(f"{name}={size}" for name, size in axes.items())
        raise UsageError(
            f"a mesh of {mesh} has {num_ranks} ranks, and this world {world_size}:"
            " start it by `assay check train --mesh`, by assay.launch, or by torchrun"
        )
    kind = torch.device(torch_device).type
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def require_no_dropout(model: nn.Module, why: str) -> None:
    """Raise UsageError, with the reason `why`, for a model whose configuration has dropout."""
    drawn = [
        f"{name} {value}"
        for name, value in cast("PreTrainedModel", model).config.to_dict().items()
        # GPT-2 has attn_pdrop, embd_pdrop and resid_pdrop. The summary belongs to classifiers.
        if name.endswith(("dropout", "pdrop"))
        and not name.startswith("summary")
        and isinstance(value, float | int)
        and value > 0
    ]
    if drawn:
        raise UsageError(f"{', '.join(drawn)}: {why}")


# Dynamo keeps this many compilations of one function, and runs further shapes uncompiled. No run has
# so many shapes.
_MOST_COMPILATIONS = 4096


def backend_of(vendor: DeviceVendor) -> str:
    """Return the backend of `torch.compile` for training."""
    return vendor.training_compile_backend or vendor.compile_backend


def describe_compiling(vendor: DeviceVendor) -> str:
    """Describe compilation for a verdict."""
    return (
        f"decoder layers are compiled by {backend_of(vendor)}; where modules are measured, each is"
        " compiled by itself, and the free run alone shows what is computed in one piece"
    )


def compile_layers(model: nn.Module, vendor: DeviceVendor) -> None:
    """Compile each decoder layer of `model` at its first call, without renaming it.

    Raises: UsageError for a model without known layers.
    """
    import torch._dynamo.config as dynamo

    layers = decoder_layers(model)
    if not layers:
        raise UsageError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules) to compile"
        )
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_COMPILATIONS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, _MOST_COMPILATIONS)
    if hasattr(model.config, "use_cache"):
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for layer in layers:
        # Each shape has its own compilation, so that results of a resumed run do not depend on earlier
        # shapes. Few compilers of accelerators support dynamic shapes, and tracing them takes five
        # times as long.
        layer.compile(backend=backend_of(vendor), dynamic=False)


def _without_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn off the key-value cache, with which no two layers share a compilation."""
    return args, {"use_cache": False, **kwargs}


# Parts of a checkpoint folder. Users need the model; the rest serves to resume.
MODEL_FOLDER = "model"
TRAINER_STATE = "trainer"
GENERATORS = "generators"


class ReferenceTrainer:
    """Trains like a textbook, in methods meant to be overridden one by one.

    A step sets gradients to None, calls `compute_loss` and `backward` for each micro-batch, then
    `reduce_gradients`, `clip_gradients` and `optimizer_step`. Gradients stay until the next step.
    On several ranks (axis `dp`), each trains on some micro-batches, and gradients are summed.
    """

    features: frozenset[str] = frozenset(
        {"lora", "recompute", PACKED, COMPILE, LOSS_SCALING, MIXED_PRECISION}
    )
    axes: frozenset[str] = frozenset({"dp"})
    losses: frozenset[str] = frozenset(LOSSES)
    first_scale: float = 2.0**16
    """Initial scale of the loss under loss scaling."""
    reduced_in_backward_by: str | None = None
    """Name of the library that reduces gradients over the ranks of dp in backward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def __init__(self) -> None:
        self._num_steps = 0

    @property
    def traits(self) -> TrainerTraits:
        """Declares that each rank of dp has its own seed, and which phase is not visible."""
        compiled = COMPILE in self.plan.features
        notes = (describe_compiling(self.device.vendor),) if compiled else ()
        library = self.reduced_in_backward_by if self.data.size > 1 else None
        reason = f"{library} adds gradients up inside of backward"
        return TrainerTraits(
            {"reduce": reason} if library else {}, dropout_masks="own", notes=notes
        )

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer. Raises: UsageError for unsupported features or axes."""
        used = {axis for axis, size in plan.mesh.items() if size > 1}
        for what, asked, known in (
            ("features", plan.features, self.features),
            ("axes of a mesh", used, self.axes),
            ("loss", {plan.loss}, self.losses),
        ):
            if unknown := sorted(asked - known):
                raise UsageError(
                    f"{type(self).__name__} does not know the {what} {', '.join(unknown)}; it"
                    f" knows: {', '.join(sorted(known))}"
                )
        self.plan = plan
        self.device = open_run(parse_run(plan.run))
        self.mesh = open_mesh(plan.mesh, self.device.torch_device)
        self.data = MeshAxis.of(self.mesh, "dp")
        self.device.seed(plan.seed)
        self.model = self.build_model(plan)
        self.optimizer = self.build_optimizer(self.model)
        # Without the feature the scaler is disabled, and only passes calls on.
        self.scaler = torch.amp.GradScaler(
            self.device_type, init_scale=self.first_scale, enabled=LOSS_SCALING in plan.features
        )
        # All ranks have initialized with the same seed. Dropout masks differ between ranks of dp.
        self.device.seed(plan.seed + self.data.index)

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """Build the model in training mode on its device, with the requested features."""
        model: Any = self.load_pretrained(plan.model)
        model = set_up(model, plan.setup)
        if PACKED in plan.features:
            require_no_dropout(
                model, "rows that are laid end to end draw other masks of dropout; train without"
            )
        if "recompute" in plan.features:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if "lora" in plan.features:
            model = add_lora(model, plan.adapter_dropout)
        self.freeze(model)
        if COMPILE in plan.features:
            compile_layers(model, self.device.vendor)
        return self.distribute(model.train())

    def freeze(self, model: nn.Module) -> None:
        """Stop training the frozen parameters of the plan."""
        for item in named_parameters(model):
            if any(fnmatchcase(item.name, glob) for glob in self.plan.frozen):
                item.tensor.requires_grad = False

    def load_pretrained(self, name: str) -> nn.Module:
        """Load the model of a hub name, folder or recipe."""
        return load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            remote_code=self.plan.remote_code,
        ).model

    def parameter_dtype(self) -> str:
        """Return the dtype of the parameters, at least float32 under mixed precision."""
        return "float32" if self._is_mixed else parse_run(self.plan.run).dtype

    def distribute(self, model: nn.Module) -> nn.Module:
        """Distribute the model over the ranks; here each has all of it."""
        return model

    @property
    def network(self) -> nn.Module:
        """The module to call for logits."""
        return self.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW over the trainable parameters. Raises: UsageError if there are none."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise UsageError(f"{self.plan.model} has no trainable parameter")
        return torch.optim.AdamW(self.parameter_groups(model), lr=self.plan.learning_rate)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the trainable parameters in groups of equal settings, for an optimizer."""
        groups: dict[str, dict[str, Any]] = {}
        for item in named_parameters(model):
            if item.tensor.requires_grad:
                settings = self.plan.settings_of(item.name, 0)
                groups.setdefault(repr(settings), settings | {"params": []})["params"].append(
                    item.tensor
                )
        # A single group keeps the options of the optimizer.
        return list(groups.values())

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one optimizer step over the micro-batches of `batch`."""
        num_tokens = check_batch(batch, self.plan.loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.set_learning_rates()
        with self.device.execution():
            own = self.train_on(batch[self.data.index :: self.data.size], num_tokens)
            total = float(self.data.sum(torch.tensor(own, dtype=torch.float64)))
            self.reduce_gradients()
            grad_norm = self.clip_gradients(self.plan.max_grad_norm)
            self.optimizer_step()
        report = StepReport(
            step=self._num_steps,
            loss=total,
            num_tokens=num_tokens,
            grad_norm=grad_norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            skipped=self.adapt_scale(),
        )
        self._num_steps += not report.skipped
        return report

    def set_learning_rates(self) -> None:
        """Set the learning rates of the plan for the next step."""
        if self.plan.learning_rate_factors:
            names = {id(one.tensor): one.name for one in named_parameters(self.model)}
            for group in self.optimizer.param_groups:
                name = names[id(group["params"][0])]
                group["lr"] = self.plan.settings_of(name, self._num_steps)["lr"]

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        """Run forward and backward of this rank's micro-batches, and return their loss."""
        total, run = 0.0, self.arrange(own)
        counting = counted("computes gradients", run, "micro-batches")
        for number, micro_batch in enumerate(counting, start=1):
            with self.accumulating(len(run) - number):
                loss = self.compute_loss(self.on_device(micro_batch), num_tokens)
                self.backward(loss)
            total += loss.item()
        return total

    def arrange(self, own: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches to run: each by itself, or all packed into one."""
        return [pack_rows(own)] if PACKED in self.plan.features else own

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch, after which `num_left` more follow in the step."""
        del num_left
        return nullcontext()

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        """Return the summed losses of the labels over the number of labels in the whole step.

        Over all micro-batches and ranks, they add up to the mean of the step.
        """
        inputs = {name: tensor for name, tensor in micro_batch.items() if name != "labels"}
        # With a cache, transformers ignores positions and treats a row as one text.
        options = {"use_cache": False} if "position_ids" in inputs else {}
        with self.computing():
            logits = self.network(**inputs, **options).logits
        labels, config = micro_batch["labels"], getattr(self.model, "config", None)
        summed = add_losses(self.plan.loss, logits, labels, config)
        return summed / num_step_tokens

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of each forward pass: autocast under mixed precision."""
        if not self._is_mixed:
            return nullcontext()
        return torch.autocast(self.device_type, getattr(torch, parse_run(self.plan.run).dtype))

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, times the loss scale."""
        self.scaler.scale(loss).backward()

    def reduce_gradients(self) -> None:
        """Sum gradients over the ranks of dp, unless backward does."""
        if self.data.size > 1 and self.reduced_in_backward_by is None:
            for parameter in self._trained():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.data.sum(parameter.grad)

    def clip_gradients(self, max_norm: float) -> float:
        """Divide by the loss scale, and scale all gradients to a norm of at most `max_norm`.

        Returns: the norm before clipping, without the loss scale.
        """
        self.scaler.unscale_(self.optimizer)
        return float(nn.utils.clip_grad_norm_(self._trained(), max_norm))

    def optimizer_step(self) -> None:
        """Update the parameters, unless scaled gradients overflowed."""
        self.scaler.step(self.optimizer)

    def adapt_scale(self) -> bool:
        """Halve the loss scale if gradients overflowed, or let it grow; called as a step ends.

        Returns: True if gradients overflowed.
        """
        before = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() < before

    def save(self, folder: Path) -> None:
        """Write a checkpoint into `folder`: the model for users, the rest to resume."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_model(folder / MODEL_FOLDER)
        self.save_progress(folder / TRAINER_STATE)
        write_state(
            folder / f"{GENERATORS}-{self.rank}", generator_states(self.device.torch_device)
        )
        self.wait_for_others()

    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, or with LoRA the adapter."""
        if self.rank != 0:
            return
        if "lora" in self.plan.features:
            save_adapter(self.model, folder)
        else:
            save_pretrained(self.model, folder)

    def load(self, folder: Path) -> None:
        """Restore the checkpoint in `folder`. Call `setup` first.

        Raises: MachineError, UnreadableFileError or UsageError for an incomplete checkpoint.
        """
        self.load_model(folder / MODEL_FOLDER)
        self.load_progress(folder / TRAINER_STATE)
        self.load_generators(read_state(folder / f"{GENERATORS}-{self.rank}"))

    def save_progress(self, path: Path) -> None:
        """Write moments and counters."""
        if self.rank == 0:
            write_state(path, {"optimizer": self.optimizer.state_dict()} | self.counters())

    def load_progress(self, path: Path) -> None:
        """Read moments and counters."""
        progress = read_state(path)
        self.load_optimizer(progress["optimizer"])
        self.load_counters(progress)

    def load_model(self, folder: Path) -> None:
        """Read the model or adapter."""
        if "lora" in self.plan.features:
            load_adapter(self.model, folder)
        else:
            self.model.load_state_dict(self.load_pretrained(str(folder)).state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on: parameters, moments, generators."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generator_states(self.device.torch_device),
            **self.counters(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Call `setup` first."""
        self.model.load_state_dict(state["model"])
        self._load_rest(state)

    def _load_rest(self, state: Mapping[str, Any]) -> None:
        self.load_optimizer(state["optimizer"])
        self.load_generators(state["generators"])
        self.load_counters(state)

    def counters(self) -> dict[str, Any]:
        """Return the number of steps and the state of the loss scale."""
        scaler = {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return {"num_steps": self._num_steps, **scaler}

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `counters`."""
        self._num_steps = state["num_steps"]
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the optimizer."""
        self.optimizer.load_state_dict(dict(state))

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the random number generators."""
        restore_generators(states, self.device.torch_device)

    def teardown(self) -> None:
        """Release model and optimizer."""
        del self.model, self.optimizer
        gc.collect()

    @property
    def device_type(self) -> str:
        """Device type in torch."""
        return torch.device(self.device.torch_device).type

    @property
    def _is_mixed(self) -> bool:
        """True if parameters are in float32 and the compute dtype is narrower."""
        is_narrow = float_format(parse_run(self.plan.run).dtype).is_narrow
        return MIXED_PRECISION in self.plan.features and is_narrow

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self.mesh is None else dist.get_rank()

    def wait_for_others(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.barrier()

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        """Copy a micro-batch to the model's device, and images and sounds to its dtype."""
        device, dtype = self.device.torch_device, next(self.model.parameters()).dtype
        values = {name for name, one in micro_batch.items() if one.is_floating_point()} - {"labels"}
        return {
            name: tensor.to(device, dtype if name in values else None)
            for name, tensor in micro_batch.items()
        }
