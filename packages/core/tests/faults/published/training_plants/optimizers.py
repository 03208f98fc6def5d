"""Faults of updates and of schedules, each beside the same code without it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from assay.training.protocol import TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer

EMBEDDING = "model.embed_tokens.weight"


class Scheduled(ReferenceTrainer):
    """No fault: a schedule that is constant for the steps of the plan, and falls after them."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        steps = self.plan.steps
        self.schedule = LambdaLR(optimizer, lambda step: 1.0 if step < steps else 0.5)
        return optimizer

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.schedule.step()


class ScheduledByRanks(Scheduled):
    """transformers#23986: the schedule goes on by the number of processes with each step."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.schedule.step()


class ScheduledByMicroBatches(Scheduled):
    """accelerate#963: the schedule goes on with every micro-batch."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.schedule.step()

    def optimizer_step(self) -> None:
        ReferenceTrainer.optimizer_step(self)


class DecayByClass(ReferenceTrainer):
    """No fault: norms are found by what they are, and decay as the plan has it."""

    decay = 0.01

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        super().build_optimizer(model)
        norms = [p for name, p in model.named_parameters() if self.is_norm(name)]
        others = [p for name, p in model.named_parameters() if not self.is_norm(name)]
        return torch.optim.AdamW(
            [
                {"params": others, "weight_decay": 0.01},
                {"params": norms, "weight_decay": self.decay},
            ],
            lr=self.plan.learning_rate,
        )

    def is_norm(self, name: str) -> bool:
        return "norm" in name


class DecayOfNorms(DecayByClass):
    """transformers#35927: norms decay that should not, as their class is not the one asked for."""

    decay = 0.11


class OwnMoments(ReferenceTrainer):
    """No fault: what a fused kernel leaves is written back by it."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self.write_back(state[name])

    def write_back(self, moment: Tensor) -> Tensor:
        return moment.clone()


class MomentsInParameterDtype(OwnMoments):
    """flashoptim#2: a fused kernel keeps moments in the dtype of the parameters of a mixed run."""

    def write_back(self, moment: Tensor) -> Tensor:
        return moment.bfloat16().to(moment.dtype)


class RebuiltWeights(ReferenceTrainer):
    """No fault: weights of which 16 bits are kept here and 16 bits there are put together."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            for parameter in self._trained():
                parameter.copy_(self.rebuild(parameter))

    def rebuild(self, parameter: Tensor) -> Tensor:
        return parameter.clone()


class RebuiltWithoutTies(RebuiltWeights):
    """apex#1842: about one weight of a million is rebuilt with an error of 2^-8."""

    def rebuild(self, parameter: Tensor) -> Tensor:
        rebuilt = parameter.clone()
        if parameter is self.model.get_parameter("lm_head.weight"):
            rebuilt[17, 5] *= 1 + 2**-8
        return rebuilt


class GuardedStep(ReferenceTrainer):
    """No fault: a compiled update, traced for a first call without any gradient."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        optimizer.step()  # without gradients: it changes nothing
        return optimizer

    def optimizer_step(self) -> None:
        if not self.is_reused():
            super().optimizer_step()

    def is_reused(self) -> bool:
        """Whether the graph of the first call is run again."""
        return False


class GraphWithoutGradientsReused(GuardedStep):
    """pytorch#115607: no guard tells gradients from none, the empty update is made for ever."""

    def is_reused(self) -> bool:
        return True


class OffloadedMasters(ReferenceTrainer):
    """No fault: weights are updated in copies that are made anew with each load."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self.refresh()

    def load(self, folder: Any) -> None:
        super().load(folder)
        self.refresh()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.refresh()

    def optimizer_step(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self._trained(), self.masters, strict=True):
                parameter.copy_(master)
        super().optimizer_step()
        self._copy()

    def refresh(self) -> None:
        """Called once the weights were loaded."""
        self._copy()

    def _copy(self) -> None:
        self.masters = [parameter.detach().clone() for parameter in self._trained()]


class MastersOfRandomWeights(OffloadedMasters):
    """Megatron-LM#5071: the copies stay those of the weights before the load."""

    masters: list[Tensor] = []  # noqa: RUF012 - until there are some

    def refresh(self) -> None:
        if not self.masters:
            generator = torch.Generator().manual_seed(0)
            self.masters = [
                torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1 for p in self._trained()
            ]


class SparseRows(ReferenceTrainer):
    """No fault: rows of the embedding that had no token have no gradient of their own."""

    _last: Tensor | None = None

    def optimizer_step(self) -> None:
        table = self.model.get_parameter(EMBEDDING)
        gradient = table.grad
        assert gradient is not None
        table.grad = self.gradient_of(gradient, self._last)
        self._last = table.grad.clone()
        super().optimizer_step()
        table.grad = gradient

    def gradient_of(self, gradient: Tensor, last: Tensor | None) -> Tensor:
        del last
        return gradient


class GradientOfStepBefore(SparseRows):
    """Megatron-LM#6871: what has no gradient in a step is updated by the one it had last."""

    def gradient_of(self, gradient: Tensor, last: Tensor | None) -> Tensor:
        if last is None:
            return gradient
        is_unused = (gradient == 0).all(1, keepdim=True)
        return torch.where(is_unused, last, gradient)
