"""Pipeline parallelism: each rank of `pp` has some of the layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from assay.devices.run_string import parse_run
from assay.models import load_model
from assay.models.candidate_code import set_up
from assay.parallel.pipeline import Pipeline, called_module, cut_stage
from assay.training.batches import MicroBatch
from assay.training.protocol import TrainerTraits, TrainingPlan
from assay.training.shapes import OF_NAMED_PIPELINES
from assay.training.trainers.adapters import add_lora
from assay.training.trainers.mesh import MeshAxis
from assay.training.trainers.tensor_parallel import TensorParallelTrainer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Only its dtype matters. Later stages pass hidden states instead of embeddings.
_UNMEASURED_PORTS = frozenset({("model.rotary_emb", "input.x")})


class PipelineTrainer(TensorParallelTrainer):
    """Runs one stage on each rank of `pp` under 1F1B, divided over `tp` and sharded over `dp`.

    `state_dict` covers the rank's own stage.
    """

    features = frozenset({"lora", "cpu-offload", "mixed-precision"})
    axes = frozenset({"dp", "tp", "pp"})
    pipeline_shapes = OF_NAMED_PIPELINES

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """Build this rank's stage, in training mode on its device."""
        self.stages = MeshAxis.of(self.mesh, "pp")
        if self.stages.size == 1:
            return super().build_model(plan)
        stage = self._load_stage(plan)
        if "lora" in plan.features:
            stage = add_lora(stage, plan.adapter_dropout)
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
