"""Faults by another author than the rules': each in a single process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer

WEIGHTS_FILE = "model.safetensors"


class ZLossAdded(ReferenceTrainer):
    """The z-loss of another recipe: 1e-4 times the square of log Z (PaLM)."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = _logits_and_labels(self, micro_batch)
        squares = logits.logsumexp(-1).square()[labels != IGNORED].sum()
        return (_token_losses(logits, labels) + 1e-4 * squares) / num_step_tokens


class LabelSmoothingLeftOn(ReferenceTrainer):
    """Labels are smoothed by 0.1."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = _logits_and_labels(self, micro_batch)
        return _token_losses(logits, labels, label_smoothing=0.1) / num_step_tokens


class LossInBfloat16(ReferenceTrainer):
    """The logits of a float32 run go to the loss in 8 bits."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = _logits_and_labels(self, micro_batch)
        return _token_losses(logits.bfloat16(), labels).float() / num_step_tokens


class LastPositionDropped(ReferenceTrainer):
    """The shift is made twice over the length: the last position of the longest row is lost."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = _logits_and_labels(self, micro_batch)
        assert (labels[:, -1] != IGNORED).any()
        return _token_losses(logits[:, :-1], labels[:, :-1]) / num_step_tokens


class LogitsCapped(ReferenceTrainer):
    """The cap of Gemma 2 on the final logits, which this model does not have."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        logits, labels = _logits_and_labels(self, micro_batch)
        return _token_losses(30 * torch.tanh(logits / 30), labels) / num_step_tokens


class DropoutDrawsAnewInBackward(ReferenceTrainer):
    """A fused dropout that keeps no mask, and draws another one in backward."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        found = [m for name, m in model.named_modules() if name.endswith("lora_dropout.default")]
        assert found
        for module in found:
            rate = module.p
            module.forward = lambda x, rate=rate: _drop(x, rate)
        return model


class NormIsSumOfNorms(ReferenceTrainer):
    """Roots are taken before the sum: the norms of parameters are added, not their squares."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = torch.stack([p.grad.norm() for p in _with_gradients(self)]).sum()
        for parameter in _with_gradients(self):
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return float(norm)


class ClippedByValue(ReferenceTrainer):
    """Each element is clipped, not the norm."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = nn.utils.get_total_norm([p.grad for p in _with_gradients(self)])
        nn.utils.clip_grad_value_(_with_gradients(self), max_norm / 100)
        return float(norm)


class ClippedAfterEachMicroBatch(ReferenceTrainer):
    """Clipped before accumulation is done: what the first micro-batch gave loses weight."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        super().clip_gradients(self.plan.max_grad_norm)


class HandWrittenAdamW(torch.optim.AdamW):
    """AdamW as the paper has it, in parts that can be got wrong."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(group, parameter)

    @torch.no_grad()
    def change(self, group: Mapping[str, Any], parameter: Tensor) -> None:
        (beta1, beta2), state = group["betas"], self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient, count = parameter.grad, float(state["step"])
        assert gradient is not None
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        second = state["exp_avg_sq"] / self.second_correction(beta1, beta2, count)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        first = state["exp_avg"] / (1 - beta1**count)
        parameter.sub_(group["lr"] * first / self.root(second, group["eps"]))

    def second_correction(self, beta1: float, beta2: float, count: float) -> float:
        del beta1
        return float(1 - beta2**count)

    def root(self, second: Tensor, eps: float) -> Tensor:
        return second.sqrt() + eps


class _OneBeta(HandWrittenAdamW):
    def second_correction(self, beta1: float, beta2: float, count: float) -> float:
        del beta2
        return float(1 - beta1**count)


class _EpsilonInside(HandWrittenAdamW):
    def root(self, second: Tensor, eps: float) -> Tensor:
        return (second + eps).sqrt()


class OptimizerByHand(ReferenceTrainer):
    """No fault: AdamW written out."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return HandWrittenAdamW(model.parameters(), lr=self.plan.learning_rate)


class SecondMomentCorrectedByFirstBeta(ReferenceTrainer):
    """Both bias corrections take beta1."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _OneBeta(model.parameters(), lr=self.plan.learning_rate)


class EpsilonInsideRoot(ReferenceTrainer):
    """TensorFlow's place for epsilon."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _EpsilonInside(model.parameters(), lr=self.plan.learning_rate)


class NormsNotDecayed(ReferenceTrainer):
    """Two groups as many recipes have them: norms are left out of the weight decay."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        others = [p for name, p in model.named_parameters() if "norm" not in name]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.plan.learning_rate)


class LastLayerLearnsFaster(ReferenceTrainer):
    """A layer-wise rate with one layer too much in the group."""

    def optimizer_step(self) -> None:
        layer: Any = self.model.get_submodule("model.layers.3")
        before = [p.detach().clone() for p in layer.parameters()]
        super().optimizer_step()
        with torch.no_grad():
            for parameter, old in zip(layer.parameters(), before, strict=True):
                parameter.add_(parameter - old, alpha=0.1)


class StepCounterStands(ReferenceTrainer):
    """The counter is not advanced: each step is corrected as if it were the first one."""

    def optimizer_step(self) -> None:
        for state in self.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])
        super().optimizer_step()


class HeadIsUpdatedInACopy(ReferenceTrainer):
    """The head's master copy is updated, and never written back."""

    def optimizer_step(self) -> None:
        head = self.model.get_parameter("lm_head.weight")
        before = head.detach().clone()
        super().optimizer_step()
        assert not torch.equal(head, before)
        with torch.no_grad():
            head.copy_(before)


class OneTensorSavedTransposed(ReferenceTrainer):
    """A square weight is exported in the layout of another framework."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change_file(folder, "model.layers.2.self_attn.q_proj.weight", lambda w: w.T.contiguous())


class EmbeddingSavedInBfloat16(ReferenceTrainer):
    """One tensor of a float32 model is written in 8 bits."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        _change_file(folder, "model.embed_tokens.weight", Tensor.bfloat16)


class StepNumberLost(ReferenceTrainer):
    """A resumed run counts its steps from zero, as a schedule that restarts does."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self._num_steps = 0


class ScheduleRestarts(ReferenceTrainer):
    """After a resume the learning rate warms up anew."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


class MomentsSavedInBfloat16(ReferenceTrainer):
    """Second moments are rounded to 8 bits on their way through the checkpoint."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        for state in self.optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().to(state["exp_avg_sq"].dtype)


class AdapterScaledTwice(ReferenceTrainer):
    """alpha / rank is applied to the loaded adapter, and once more in forward."""

    def load_model(self, folder: Path) -> None:
        super().load_model(folder)
        modules: list[Any] = list(self.model.modules())
        layers = [module for module in modules if hasattr(module, "lora_A")]
        assert layers
        for module in layers:
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


class RowsInOtherOrder(ReferenceTrainer):
    """The collator turns the rows of a micro-batch round, and forgets the mask."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        turned = [
            {name: t.flip(0) if name != "attention_mask" else t for name, t in one.items()}
            for one in batch
        ]
        return super().step(turned)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return functional.dropout(x, rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return functional.dropout(gradient, ctx.rate), None


def _drop(x: Tensor, rate: float) -> Any:
    return _Drop.apply(x, rate)  # type: ignore[no-untyped-call]


def _logits_and_labels(trainer: ReferenceTrainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logits in at least float32 and what they are to predict."""
    logits = trainer.network(
        input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
    ).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide[:, :-1], micro_batch["labels"][:, 1:]


def _token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def _with_gradients(trainer: ReferenceTrainer) -> list[Any]:
    return [p for p in trainer.model.parameters() if p.grad is not None]


def _change_file(folder: Path, name: str, change: Any) -> None:
    path = folder / WEIGHTS_FILE
    tensors = load_file(path)
    changed = change(tensors[name])
    assert changed.dtype != tensors[name].dtype or not torch.equal(changed, tensors[name])
    save_file(tensors | {name: changed}, path, {"format": "pt"})
