"""Trainers with one fault each, for `assay check train --candidate-trainer`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.training.batches import count_label_tokens
from assay.training.protocol import MicroBatch, StepReport, TrainerTraits, TrainingPlan
from assay.training.trainers.adapters import ADAPTER_FILE
from assay.training.trainers.reference import ReferenceTrainer

WEIGHTS_FILE = "model.safetensors"


class MeanOfMeans(ReferenceTrainer):
    """transformers#34191: each micro-batch is averaged by itself, and then their means are."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        own = count_label_tokens(micro_batch) * self.plan.micro_batches
        return super().compute_loss(micro_batch, own)


class NotDividedByMicroBatches(ReferenceTrainer):
    """The gradients of all micro-batches are added up, each the mean of its own."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, count_label_tokens(micro_batch))


class BackwardOfScaledLoss(ReferenceTrainer):
    """The loss is reported right; what is differentiated is divided by the micro-batches."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.plan.micro_batches)


class OnlyTheLastMicroBatch(ReferenceTrainer):
    """Gradients are set to zero before each micro-batch instead of each step."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(loss)


class LossScaleNotTakenOut(ReferenceTrainer):
    """Mixed precision: gradients are clipped before they are unscaled."""

    def reduce_gradients(self) -> None:
        for parameter in _with_gradients(self):
            parameter.grad *= 1024


class ReducedAsMeanOfSums(ReferenceTrainer):
    """Gradients are divided by the number of ranks once too often."""

    def reduce_gradients(self) -> None:
        for parameter in _with_gradients(self):
            parameter.grad /= 2


class HalfOfTheReductionLost(ReferenceTrainer):
    """One parameter's gradient is not summed: half of it is missing."""

    def reduce_gradients(self) -> None:
        parameter = self.model.get_parameter("model.layers.2.mlp.gate_proj.weight")
        assert parameter.grad is not None
        parameter.grad /= 2


class ClippedByHalfOfTheNorm(ReferenceTrainer):
    """DeepSpeed#5150: the norm is that of half of the parameters."""

    def clip_gradients(self, max_norm: float) -> float:
        parameters = _with_gradients(self)
        half = parameters[: len(parameters) // 2]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(p.grad) for p in half])
        )
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad *= scale
        return float(norm)


class ClippedOneByOne(ReferenceTrainer):
    """Each parameter is clipped by its own norm."""

    def clip_gradients(self, max_norm: float) -> float:
        return max(float(nn.utils.clip_grad_norm_([p], max_norm)) for p in _with_gradients(self))


class NotClipped(ReferenceTrainer):
    """The norm is measured, and nothing is done about it."""

    def clip_gradients(self, max_norm: float) -> float:
        return super().clip_gradients(1e9)


class ClippedByLargest(ReferenceTrainer):
    """The maximum norm instead of the Euclidean one."""

    def clip_gradients(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(_with_gradients(self), max_norm, torch.inf))


class OptimizerOverClones(ReferenceTrainer):
    """accelerate#2665: the optimizer holds copies of the parameters."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
        return torch.optim.AdamW(copies, lr=self.plan.learning_rate)


class OneParameterLeftOut(ReferenceTrainer):
    """One parameter never gets to the optimizer."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kept = [p for name, p in model.named_parameters() if name != "model.norm.weight"]
        return torch.optim.AdamW(kept, lr=self.plan.learning_rate)


class DecayNotDecoupled(ReferenceTrainer):
    """Adam with the weight decay in the gradient instead of AdamW."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.plan.learning_rate, weight_decay=0.01)


class OtherBeta(ReferenceTrainer):
    """A second moment that forgets ten times as fast."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.plan.learning_rate, betas=(0.9, 0.99))


class TwiceTheLearningRate(ReferenceTrainer):
    """A learning rate scaled with the number of micro-batches."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2 * self.plan.learning_rate)


class BiasNotCorrected(ReferenceTrainer):
    """The step counter stands at 1000: no bias correction of the first steps."""

    def optimizer_step(self) -> None:
        for state in self.optimizer.state.values():
            state["step"] = torch.full_like(state["step"], 1000.0)
        super().optimizer_step()


class SteppedTwice(ReferenceTrainer):
    """Every step is made twice with the same gradients."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        super().optimizer_step()


class WeightsShrunkAfterwards(ReferenceTrainer):
    """Outside of every phase: after a step all weights are shrunk."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.99)
        return report


class MomentsDropped(ReferenceTrainer):
    """Megatron-LM#761: the moments are not loaded."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        pass


class StepCountReset(ReferenceTrainer):
    """Megatron-LM#761: the moments are there, their bias correction starts anew."""

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        super().load_optimizer(state)
        for moments in self.optimizer.state.values():
            moments["step"] = torch.zeros_like(moments["step"])


class GeneratorsNotRestored(ReferenceTrainer):
    """Dropout goes on with other masks."""

    def load_generators(self, states: Mapping[str, Any]) -> None:
        pass


class WeightsNotLoaded(ReferenceTrainer):
    """A resumed run starts from the model it was started from."""

    def load_model(self, folder: Path) -> None:
        pass


class OneTensorSavedAsZeros(ReferenceTrainer):
    """DeepSpeed#6791: one tensor of many is zero."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        name = "model.layers.1.self_attn.o_proj.weight"
        _change_file(folder / WEIGHTS_FILE, name, torch.zeros_like)


class NeighboursExchangedOnSave(ReferenceTrainer):
    """Two tensors of one shape are in each other's place."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        path = folder / WEIGHTS_FILE
        tensors = load_file(path)
        one, other = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
        tensors[one], tensors[other] = tensors[other], tensors[one]
        save_file(tensors, path, {"format": "pt"})


class SavedOneStepLate(ReferenceTrainer):
    """The checkpoint holds the weights as they were before the last step."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self._before = {name: value.clone() for name, value in self.model.state_dict().items()}
        return super().step(batch)

    def save_model(self, folder: Path) -> None:
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self._before)
        super().save_model(folder)
        self.model.load_state_dict(now)


class AdapterSavedAsZeros(ReferenceTrainer):
    """peft#2450: the adapter's file holds zeros."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        path = folder / ADAPTER_FILE
        save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path)


class AdapterSavedWithoutTensors(ReferenceTrainer):
    """peft#3251: the file is there and holds nothing."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        save_file({}, folder / ADAPTER_FILE)


class AdapterMergedOnLoad(ReferenceTrainer):
    """peft#286: loading merges the adapter into the weights, and the adapter acts once more."""

    def load_model(self, folder: Path) -> None:
        super().load_model(folder)
        model: Any = self.model
        model.merge_adapter()
        for module in model.modules():
            if hasattr(module, "merged_adapters"):
                module.merged_adapters = []


class BaseNotFrozen(ReferenceTrainer):
    """The model under the adapter is trained with it."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        return super().build_model(plan).requires_grad_()


class RecomputeLosesGenerator(ReferenceTrainer):
    """OLMo-core#828: recomputed activations are dropped by other masks."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        return model  # type: ignore[no-any-return]


class ReducesInBackward(ReferenceTrainer):
    """No fault: reduction cannot be observed, which the trainer declares."""

    traits = TrainerTraits(invisible_phases={"reduce": "fused into backward"})
    reduce_gradients = None  # type: ignore[assignment]

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        return _plain_step(self, batch)


class StepsByItself(ReferenceTrainer):
    """No fault that could be seen: the optimizer is called past the methods of phases."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        return _plain_step(self, batch, self.optimizer.step)


class LabelsShiftedTwice(ReferenceTrainer):
    """The labels are shifted by the collator and by the model."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"].roll(-1, dims=1)
        labels[:, -1] = -100
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class PaddingLearned(ReferenceTrainer):
    """Padding is not masked in the labels."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        padding = micro_batch["attention_mask"] == 0
        labels = torch.where(padding, micro_batch["input_ids"], micro_batch["labels"])
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


class Recomputes(ReferenceTrainer):
    """No fault: activations are recomputed in backward."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]


class RecomputesReentrantly(ReferenceTrainer):
    """No fault: the same by the older way."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        return model  # type: ignore[no-any-return]


class RecomputesAsAnAccelerator(Recomputes):
    """No fault: backward runs on a thread of its own."""

    def backward(self, loss: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().backward, loss).result()


class MicroBatchesReordered(ReferenceTrainer):
    """Another order of the data."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        return super().step(list(reversed(batch)))


class LossIsNaN(ReferenceTrainer):
    """As float16 does when it overflows."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) * torch.nan


def _plain_step(
    trainer: ReferenceTrainer, batch: Sequence[MicroBatch], finish: Any = None
) -> StepReport:
    """A step without reduction."""
    num_tokens = sum(map(count_label_tokens, batch))
    trainer.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for micro_batch in batch:
        loss = trainer.compute_loss(micro_batch, num_tokens)
        trainer.backward(loss)
        total += loss.item()
    norm = trainer.clip_gradients(trainer.plan.max_grad_norm)
    (finish or trainer.optimizer_step)()
    trainer._num_steps += 1
    return StepReport(trainer._num_steps - 1, total, num_tokens, norm, trainer.plan.learning_rate)


def _with_gradients(trainer: ReferenceTrainer) -> list[Any]:
    return [p for p in trainer.model.parameters() if p.grad is not None]


def _change_file(path: Path, name: str, change: Any) -> None:
    tensors = load_file(path)
    assert tensors[name].any()
    save_file(tensors | {name: change(tensors[name])}, path, {"format": "pt"})


class SavesElsewhere(ReferenceTrainer):
    """The checkpoint has no folder of the model; what it has is loaded again."""

    def save_model(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder.parent / "weights.pt")

    def load_model(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder.parent / "weights.pt"))
