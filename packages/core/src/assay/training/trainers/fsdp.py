"""FSDP2: parameters, gradients and moments are sharded over ranks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.devices.run_string import parse_run
from assay.parallel.checkpoints import (
    load_checkpoint,
    save_adapter,
    save_checkpoint,
    save_model,
)
from assay.parallel.clipping import clip_gradients
from assay.parallel.fsdp import shard_parameters
from assay.training.state.sharding import moment_like, put, whole
from assay.training.trainers.reference import ReferenceTrainer


class FSDPTrainer(ReferenceTrainer):
    """Shards every decoder layer as a unit, and the rest of the model as another one."""

    features = ReferenceTrainer.features | {"cpu-offload"}
    reduced_in_backward_by = "FSDP2"

    def distribute(self, model: nn.Module) -> nn.Module:
        """Shard every decoder layer, then the rest."""
        if self.mesh is None:
            return model
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
