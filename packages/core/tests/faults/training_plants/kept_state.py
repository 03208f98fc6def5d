"""Faults in state that is kept from step to step, or from save to load, and is not reported."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.state.files import read_state, write_state
from assay.training.trainers.reference import ReferenceTrainer


class MasterWeightsForgotten(ReferenceTrainer):
    """Copies in higher precision, outside of model and optimizer, are not loaded."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self._copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._copy()

    def optimizer_step(self) -> None:
        for parameter, master in zip(self._trained(), self.masters, strict=True):
            parameter.data.copy_(master)
        super().optimizer_step()
        self._copy()

    def _copy(self) -> None:
        self.masters = [parameter.detach().clone() for parameter in self._trained()]


class MomentsForgottenInSecret(ReferenceTrainer):
    """Neither the checkpoint nor the reported state has moments."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = state["optimizer"]["param_groups"]
        return state | {"optimizer": {"state": {}, "param_groups": groups}}

    def save_progress(self, path: Path) -> None:
        write_state(path, {"num_steps": self._num_steps})

    def load_progress(self, path: Path) -> None:
        self._num_steps = read_state(path)["num_steps"]


class FirstMomentsSavedAgain(ReferenceTrainer):
    """NeMo-RL#3312: what the first checkpoint was written from is written into every later one."""

    _progress: dict[str, Any] | None = None

    def save_progress(self, path: Path) -> None:
        if self._progress is None:
            self._progress = copy.deepcopy(self.optimizer.state_dict())
        write_state(path, {"optimizer": self._progress, "num_steps": self._num_steps})


class OptimizerMadeAnew(ReferenceTrainer):
    """Moments are lost after every step."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        self.optimizer = self.build_optimizer(self.model)
        return report


class MicroBatchesCounted(ReferenceTrainer):
    """The optimizer's counter goes on by the micro-batches of a step."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        for state in self.optimizer.state.values():
            state["step"] += len(batch) - 1
        return report


class ShrunkWhileClipping(ReferenceTrainer):
    """What is clipped is the weights, too."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = super().clip_gradients(max_norm)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.99)
        return norm


class BaseShrunkAfterwards(ReferenceTrainer):
    """Weights that are frozen lose a hundredth in every step."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(0.99)


class OtherSettingsSaved(ReferenceTrainer):
    """The model folder names another epsilon."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change(folder / "config.json", "rms_norm_eps", 1e-2)


class OtherScaleSaved(ReferenceTrainer):
    """The adapter's folder names another alpha."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change(folder / "adapter_config.json", "lora_alpha", 32)


def _change(file: Path, name: str, value: float) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
