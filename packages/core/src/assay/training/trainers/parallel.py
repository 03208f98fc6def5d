"""Trainers of several ranks: DistributedDataParallel, FSDP2, tensor and pipeline parallelism."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from assay.devices.run_string import parse_run
from assay.errors import UsageError, name_some
from assay.models import load_model
from assay.models.candidate_code import set_up
from assay.parallel.checkpoints import (
    load_checkpoint,
    save_adapter,
    save_checkpoint,
    save_model,
)
from assay.parallel.pipeline import (
    Pipeline,
    called_module,
    clip_gradients,
    cut_stage,
    shard_parameters,
)
from assay.parallel.rank_boundaries import RankBoundaries
from assay.parallel.tensor_parallel import apply_tensor_parallel
from assay.training.protocol import (
    NEXT_TOKEN,
    OF_NAMED_PIPELINES,
    MicroBatch,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.state.parameters import moment_like, put, whole
from assay.training.trainers.adapters import add_lora
from assay.training.trainers.reference import MeshAxis, ReferenceTrainer, require_no_dropout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class DDPTrainer(ReferenceTrainer):
    """Reduces gradients in buckets while the backward pass of the last micro-batch runs."""

    reduced_in_backward_by = "DistributedDataParallel"
    _replica: nn.Module

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap the model, and return it without the wrapper, which adds a prefix to names."""
        if self.data.size == 1:
            self._replica = model
            return model
        replica = DistributedDataParallel(model, process_group=self.data.group)
        replica.register_comm_hook(self.data.group, add_up)
        self._replica = replica
        return model

    @property
    def network(self) -> nn.Module:
        """The wrapper."""
        return self._replica

    def accumulating(self, num_left: int) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: only the last one reduces gradients."""
        if num_left and isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return nullcontext()

    def teardown(self) -> None:
        """Release the wrapper too."""
        del self._replica
        super().teardown()


def add_up(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Sum gradients without averaging: losses are already shares of the step's mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


class FSDPTrainer(ReferenceTrainer):
    """Shards every decoder layer as a unit, and the rest of the model as another one."""

    features = ReferenceTrainer.features | {"cpu-offload"}
    reduced_in_backward_by = "FSDP2"

    def distribute(self, model: nn.Module) -> nn.Module:
        """Shard every decoder layer, then the rest."""
        if self.mesh is None:
            return model
        settings = cast("PreTrainedModel", model).config.to_dict()
        if left_out := [name for name in settings if name.endswith("layerdrop") and settings[name]]:
            raise UsageError(
                f"{name_some(left_out)}: under FSDP, layers that are left out still draw masks of"
                " dropout; set it to 0"
            )
        dtype = getattr(torch, parse_run(self.plan.run).dtype)
        return shard_parameters(
            model,
            self.mesh["dp"],
            compute_dtype=dtype if self._is_mixed else None,
            kept_on="host" if "cpu-offload" in self.plan.features else "device",
        )

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of each forward pass; FSDP gathers parameters in the compute dtype."""
        return super().computing() if self.mesh is None else nullcontext()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW without foreach, which cannot mix parameters of several meshes."""
        super().build_optimizer(model)  # raises for a model without trainable parameters
        groups = self.parameter_groups(model)
        return torch.optim.AdamW(groups, lr=self.plan.learning_rate, foreach=False)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients, and return the norm of whole gradients.

        For DTensors, torch reports an overflow on one rank to all ranks.
        """
        self.scaler.unscale_(self.optimizer)
        return float(clip_gradients(self._trained(), max_norm))

    def save_model(self, folder: Path) -> None:
        """Gather and write the model, or with LoRA the adapter."""
        if self.mesh is None:
            super().save_model(folder)
        elif "lora" in self.plan.features:
            save_adapter(folder, self.model)
        else:
            save_model(folder, self.model)

    def save_progress(self, path: Path) -> None:
        """Write this rank's part of parameters and moments."""
        save_checkpoint(path, self.model, self.optimizer, self.counters())

    def load_progress(self, path: Path) -> None:
        """Read the ranks' parts of parameters and moments."""
        counters = load_checkpoint(path, self.model, self.optimizer, self.counters())
        self.load_counters(counters)

    def load_model(self, folder: Path) -> None:
        """Do nothing: `load_progress` reads the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, whole."""
        return {name: _whole(part) for name, part in super().state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's parts of a whole state."""
        for name, value in self.model.state_dict().items():
            put(value, state["model"][name])
        self._load_rest(state)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load moments, sharded like their parameters."""
        moments = {
            number: {
                name: moment_like(value, parameter)
                for name, value in state["state"][number].items()
            }
            for number, parameter in enumerate(self._trained())
            if number in state["state"]
        }
        super().load_optimizer(dict(state) | {"state": moments})


def _whole(value: object) -> object:
    if isinstance(value, Tensor):
        return whole(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


class TensorParallelTrainer(FSDPTrainer):
    """Divides the model over `tp`, and shards it by FSDP2 over `dp`."""

    features = frozenset({"lora", "recompute", "cpu-offload", "mixed-precision"})
    axes = frozenset({"dp", "tp"})

    _layout: RankBoundaries | None = None

    @property
    def traits(self) -> TrainerTraits:
        """Declares the layout of tensors over the ranks of tp too."""
        return replace(super().traits, layout=self._layout)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Divide the model, then shard the part of each rank."""
        if self.mesh is None:
            return model
        if "tp" in (self.mesh.mesh_dim_names or ()):
            require_no_dropout(
                model,
                "ranks of tp draw masks of dropout that no single process draws; train without, or"
                " on dp",
            )
            mesh = self.mesh["tp"]
            self._layout = RankBoundaries(apply_tensor_parallel(model, mesh), mesh.get_group())
        return super().distribute(model) if self.data.size > 1 else model


# Only its dtype matters. Later stages pass hidden states instead of embeddings.
_UNMEASURED_PORTS = frozenset({("model.rotary_emb", "input.x")})


class PipelineTrainer(TensorParallelTrainer):
    """Runs one stage on each rank of `pp` under 1F1B, divided over `tp` and sharded over `dp`.

    `state_dict` covers the rank's own stage.
    """

    features = frozenset({"lora", "cpu-offload", "mixed-precision"})
    axes = frozenset({"dp", "tp", "pp"})
    losses = frozenset({NEXT_TOKEN})
    pipeline_shapes = OF_NAMED_PIPELINES

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """Build this rank's stage, in training mode on its device."""
        self.stages = MeshAxis.of(self.mesh, "pp")
        if self.stages.size == 1:
            return super().build_model(plan)
        stage = self._load_stage(plan)
        if "lora" in plan.features:
            stage = add_lora(stage, plan.adapter_dropout)
        self.freeze(stage)
        model = self.distribute(stage.train())
        self.pipeline = Pipeline(
            model,
            cast("DeviceMesh", self.mesh)["pp"],
            hidden_dtype=getattr(torch, parse_run(plan.run).dtype),
        )
        return model

    @property
    def traits(self) -> TrainerTraits:
        """Declares modules divided over stages, and the module that the schedule calls."""
        called = self.network
        path = next(path for path, one in self.model.named_modules() if one is called)
        divided = self.stages.size > 1
        return replace(
            super().traits,
            partial_modules=frozenset({"", "model"}) if divided else frozenset(),
            unmeasured_ports=_UNMEASURED_PORTS if divided else frozenset(),
            scheduled_module=path,
        )

    @property
    def network(self) -> nn.Module:
        """The module that the schedule calls for each micro-batch."""
        return called_module(self.model)

    def _load_stage(self, plan: TrainingPlan) -> nn.Module:
        # On the host, as the device may have memory for this stage only.
        whole: Any = load_model(
            plan.model, dtype=self.parameter_dtype(), remote_code=plan.remote_code
        ).model
        if plan.setup is not None:
            whole = set_up(whole.to(self.device.torch_device), plan.setup)
        stage = cut_stage(whole, self.stages.size, self.stages.index)
        return stage.to(self.device.torch_device)

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        """Run forward and backward of this rank's micro-batches, and return their loss."""
        if self.stages.size == 1:
            return super().train_on(own, num_tokens)
        return self.run_schedule([self.on_device(one) for one in own], num_tokens)

    def run_schedule(self, batch: Sequence[MicroBatch], num_tokens: int) -> float:
        """Run forward and backward of all micro-batches, and return their loss.

        Stages send tensors of one shape, so micro-batches of different shapes run one by one. All
        ranks of dp do the same, because their collectives have to match.
        """
        alike = len({one["input_ids"].shape for one in batch}) == 1
        parts = [batch] if alike else [[one] for one in batch]
        return sum(float(self.pipeline.forward_backward(part, num_tokens)) for part in parts)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients, and return the norm over all stages."""
        if self.stages.size == 1:
            return super().clip_gradients(max_norm)
        return float(self.pipeline.clip_gradients(max_norm))

    def teardown(self) -> None:
        """Release the schedule too."""
        if self.stages.size > 1:
            del self.pipeline
        super().teardown()
