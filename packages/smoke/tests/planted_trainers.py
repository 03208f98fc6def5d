"""Trainers with one fault each, in a checkpoint, adapter, update or process."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.training.protocol import MicroBatch, TrainingPlan
from assay.training.state.parameters import local_part
from assay.training.trainers.adapters import ADAPTER_FILE, read_adapter
from assay.training.trainers.parallel import DDPTrainer, FSDPTrainer
from assay.training.trainers.reference import ReferenceTrainer
from assay_smoke.cases.worlds import MERGED_FOLDER, TERMINATED_CHECKPOINT

KILLED_IN_STEP, KILLED_RANK = 1, 1

held: list[Tensor] = []


class MomentsDropped(ReferenceTrainer):
    """Megatron-LM#761."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        pass


class DrawsAfterLoading(ReferenceTrainer):
    """Draws a random number after loading. No state shows it, but losses do."""

    _loaded = False

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._loaded = True

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        if self._loaded:
            torch.rand(1)
        self._loaded = False
        return super().compute_loss(micro_batch, num_step_tokens)


class RestoredOnlyInItsProcess(ReferenceTrainer):
    """Restores moments only in the process that saved them."""

    _HERE = "SAVED_IN_THIS_PROCESS"

    def save_progress(self, path: Path) -> None:
        super().save_progress(path)
        os.environ[self._HERE] = "1"

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        if self._HERE in os.environ:
            super().load_optimizer(state)


class OneShardZeroed(FSDPTrainer):
    """DeepSpeed#6791: one tensor of one rank's checkpoint is zero."""

    def save_progress(self, path: Path) -> None:
        part = local_part(self._trained()[3].detach())
        kept = part.clone()
        if self.rank == 1:
            part.zero_()
        super().save_progress(path)
        part.copy_(kept)


class AdapterSavedEmpty(ReferenceTrainer):
    """peft#2450: the file exists, but its tensors have no elements."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        empty = {name: torch.zeros(0) for name in read_adapter(folder)}
        save_file(empty, folder / ADAPTER_FILE)


class AdapterMergedTwice(ReferenceTrainer):
    """Exports weights with the adapter merged twice."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        model: Any = self.model
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.merge_adapter()
        base = model.get_base_model()
        state = {
            name.replace("base_layer.", ""): value.clone()
            for name, value in base.state_dict().items()
            if "lora_" not in name
        }
        for path, module in base.named_modules():
            if hasattr(module, "get_delta_weight"):
                state[f"{path}.weight"] += module.get_delta_weight("default")
        model.unmerge_adapter()
        for name, p in model.named_parameters():
            p.data.copy_(weights[name])
        base.config.save_pretrained(folder / MERGED_FOLDER)
        save_file(state, folder / MERGED_FOLDER / "model.safetensors", {"format": "pt"})


class SecondCheckpointRepeatsFirst(ReferenceTrainer):
    """Writes the tensors of the first checkpoint again."""

    _first: dict[str, Tensor] | None = None

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        file = folder / "model.safetensors"
        self._first = self._first or load_file(file)
        save_file(self._first, file, {"format": "pt"})


class StartsFromOtherWeights(ReferenceTrainer):
    """Loads a folder except for one tensor, which keeps its random values."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        if not plan.model.startswith("micro:"):
            model.get_parameter("model.layers.2.mlp.up_proj.weight").data.normal_(std=0.02)
        return model


class MasterWeightsNotRefreshed(ReferenceTrainer):
    """DeepSpeed#5150: float32 master weights are those from before the model was loaded."""

    _masters: list[Tensor]

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self._refresh()

    def _refresh(self) -> None:
        self._masters = [p.detach().float().clone() for p in self._trained()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._refresh()

    def optimizer_step(self) -> None:
        before = [p.detach().clone() for p in self._trained()]
        super().optimizer_step()
        with torch.no_grad():
            for p, old, master in zip(self._trained(), before, self._masters, strict=True):
                p.copy_(master.add_(p - old))


class OffloadKeepsStaleCopy(FSDPTrainer):
    """Restores one parameter's offloaded values from before the last step."""

    _stale: Tensor | None = None

    def optimizer_step(self) -> None:
        part = local_part(self._trained()[5].detach())
        old = part.clone()
        super().optimizer_step()
        if self._stale is not None:
            part.copy_(self._stale)
        self._stale = old


class FrozenParameterMoves(ReferenceTrainer):
    """Changes a weight under the adapter outside of the optimizer."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            self.model.get_parameter("base_model.model.model.norm.weight").mul_(1.001)


class ParametersFrozen(ReferenceTrainer):
    """accelerate#2665: the optimizer holds copies of the parameters."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
        return torch.optim.AdamW(copies, lr=self.plan.learning_rate)


class OnlyLastMicroBatch(ReferenceTrainer):
    """DeepSpeed#4795: gradients of all but the last micro-batch are lost."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        super().backward(loss)


class LearningRateSteppedTooOften(ReferenceTrainer):
    """accelerate#1382: the schedule advances once per micro-batch."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.8


class LossIsNaN(ReferenceTrainer):
    """Overflows like float16."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) * torch.nan


class RankKilledInAStep(FSDPTrainer):
    """Is killed as for lack of memory."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        if self._num_steps == KILLED_IN_STEP and self.rank == KILLED_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(micro_batch, num_step_tokens)


class HangsInTearDown(ReferenceTrainer):
    """Waits for a thread that never ends."""

    def teardown(self) -> None:
        time.sleep(3600)


class LeavesProcess(ReferenceTrainer):
    """Leaves a helper process in its own session."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        subprocess.Popen(["sleep", "120"], start_new_session=True)


class LeavesProcessInItsGroup(ReferenceTrainer):
    """Leaves a worker process that would end with the launcher's group."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        subprocess.Popen(["sleep", "120"])


class DiskIsFull(ReferenceTrainer):
    """Finds no room for the checkpoint."""

    def save_model(self, folder: Path) -> None:
        del folder
        raise OSError(28, "No space left on device")


class KeepsTheModel(ReferenceTrainer):
    """Keeps the model in a global."""

    def teardown(self) -> None:
        held.extend(self.model.parameters())
        super().teardown()


class KeepsItsShards(FSDPTrainer):
    """Keeps a rank's shards in a global. More ranks hold less of the model each."""

    def teardown(self) -> None:
        held.extend(local_part(parameter) for parameter in self.model.parameters())
        super().teardown()


class SavesNothingAfterSigterm(ReferenceTrainer):
    """Skips the checkpoint after SIGTERM."""

    def save(self, folder: Path) -> None:
        if folder.name != TERMINATED_CHECKPOINT:
            super().save(folder)


class SteppedTwiceAtTheEnd(ReferenceTrainer):
    """Makes the last step twice. No loss follows it."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self._num_steps == self.plan.steps - 1:
            super().optimizer_step()


class ReplicasDrift(DDPTrainer):
    """Changes a moment of one rank by far less than any loss shows."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.rank == 1:
            self.optimizer.state[self._trained()[3]]["exp_avg"].mul_(1 + 1e-6)


class IgnoresSigterm(ReferenceTrainer):
    """Handles the signal without telling anybody."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().compute_loss(micro_batch, num_step_tokens)
