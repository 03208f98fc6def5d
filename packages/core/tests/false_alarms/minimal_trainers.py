"""Loops of different styles with the required methods of a trainer alone, as users write them.

Each is correct. `STYLE__FAULT` is the same loop with a fault: `Closure__clip` clips to another norm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from assay.models import load_model
from assay.training import MicroBatch, StepReport, TrainingPlan, count_label_tokens, set_up

FAULTS = {
    "forward": "forward", "backward": "backward", "accumulation": "backward", "clip": "clip",
    "optimizer": "optimizer", "schedule": "optimizer", "groups": "optimizer",
    "checkpoint": "checkpoint",
}  # fmt: skip
"""Each fault with its phase."""
NORMS = "*norm*"
WARM_UP = (0.25, 0.5, 1.0)


class Plain:
    """Gradients are cleared at the start of a step."""

    fault: ClassVar[str] = ""

    def setup(self, plan: TrainingPlan) -> None:
        self.plan, self.num_steps = plan, 0
        self.device, dtype = plan.run.split("/")
        torch.manual_seed(plan.seed)
        model = load_model(plan.model, dtype=dtype, device=self.device).model
        self.model: nn.Module = set_up(model, plan.setup).train()
        if self.fault == "forward":
            layer = self.model.get_submodule("model.layers.1.mlp.down_proj")
            layer.register_forward_hook(lambda module, args, output: output * 1.05)
        if self.fault == "backward":
            weight = self.model.get_parameter("model.layers.1.self_attn.k_proj.weight")
            weight.register_hook(lambda gradient: gradient * 2)
        self.optimizer: torch.optim.Optimizer = self.build_optimizer()
        if self.fault == "groups":
            self.split_off_keys()
        self.prepare()

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate)

    def split_off_keys(self) -> None:
        """Let the keys of attention learn at twice the rate: bfloat16 rounds updates of norms to zero."""
        keys = [one for name, one in self.model.named_parameters() if "k_proj" in name]
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not one for one in keys)]
        self.optimizer.add_param_group({"params": keys, "lr": 2 * self.rate})

    def prepare(self) -> None:
        """Build what a style needs."""

    @property
    def rate(self) -> float:
        is_late = self.fault == "schedule" and self.num_steps
        factor = 1.5 if self.fault == "optimizer" else 0.5 if is_late else 1
        return self.plan.learning_rate * factor

    def schedule_rate(self) -> None:
        """Set the rate of this step, as a loop with a wrong schedule does."""
        if self.fault == "schedule":
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate

    @property
    def max_norm(self) -> float:
        return self.plan.max_grad_norm * (0.5 if self.fault == "clip" else 1)

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.optimizer.zero_grad()
        total, num_tokens = self.accumulate(batch)
        norm = self.clip()
        self.optimizer.step()
        return self.report(total, num_tokens, norm)

    def accumulate(self, batch: Sequence[MicroBatch]) -> tuple[float, int]:
        self.schedule_rate()
        total, num_tokens = 0.0, sum(map(count_label_tokens, batch))
        for number, micro_batch in enumerate(batch):
            if self.fault == "accumulation" and number:
                self.optimizer.zero_grad()
            loss = self.loss(micro_batch, num_tokens)
            self.backward_of(loss)
            total += float(loss)
        return total, num_tokens

    def loss(self, micro_batch: MicroBatch, num_tokens: int) -> Tensor:
        own = {name: value.to(self.device) for name, value in micro_batch.items()}
        logits = self.model(input_ids=own["input_ids"], attention_mask=own["attention_mask"]).logits
        summed = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), own["labels"][:, 1:].flatten(), reduction="sum"
        )
        return summed / num_tokens

    def backward_of(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))

    def report(self, total: float, num_tokens: int, norm: float) -> StepReport:
        self.num_steps += 1
        return StepReport(self.num_steps - 1, total, num_tokens, norm, self.plan.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": {},
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder / "model")  # type: ignore[operator]  # of transformers
        torch.save(self.state_dict(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        if self.fault == "checkpoint":
            for moments in state["optimizer"]["state"].values():
                moments["exp_avg"].zero_()
        self.load_state_dict(state)

    def teardown(self) -> None:
        del self.model, self.optimizer


class ClearsAtTheEnd(Plain):
    """Gradients are gone as a step ends."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        total, num_tokens = self.accumulate(batch)
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.report(total, num_tokens, norm)


class Closure(Plain):
    """The optimizer calls a closure that computes the gradients."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        results: list[Any] = []

        def closure() -> float:
            self.optimizer.zero_grad()
            results[:] = *self.accumulate(batch), self.clip()
            return float(results[0])

        self.optimizer.step(closure)
        return self.report(*results)


class ClosureOfMethods(Closure):
    """The same, in methods that a check sees."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.batch = batch
        self.optimizer_step()
        return self.report(*self.results)

    def optimizer_step(self) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            self.results = *self.accumulate(self.batch), self.clip_gradients(self.max_norm)
            return self.results[0]

        self.optimizer.step(closure)

    def loss(self, micro_batch: MicroBatch, num_tokens: int) -> Tensor:
        return self.compute_loss(micro_batch, num_tokens)

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().loss(micro_batch, num_step_tokens)

    def backward_of(self, loss: Tensor) -> None:
        self.backward(loss)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))


class ClipsBetweenMethods(ClosureOfMethods):
    """Loss, backward and optimizer are methods, and clipping is not."""

    clip_gradients = None  # type: ignore[assignment]

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.optimizer.zero_grad()
        total, num_tokens = self.accumulate(batch)
        norm = self.clip()
        self.optimizer_step()
        return self.report(total, num_tokens, norm)

    def optimizer_step(self) -> None:
        self.optimizer.step()


class SumsLosses(Plain):
    """One backward pass for the sum of all losses."""

    def accumulate(self, batch: Sequence[MicroBatch]) -> tuple[float, int]:
        self.schedule_rate()
        num_tokens = sum(map(count_label_tokens, batch))
        losses = [self.loss(one, num_tokens) for one in batch]
        loss = losses[-1] if self.fault == "accumulation" else torch.stack(losses).sum()
        self.backward_of(loss)
        return float(sum(losses)), num_tokens


class WarmsUp(Plain):
    """A schedule, which the class states."""

    stated_plan: ClassVar = {"learning_rate_factors": WARM_UP}

    def prepare(self) -> None:
        factors = (WARM_UP[0], *WARM_UP) if self.fault == "schedule" else WARM_UP
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: factors[min(step, len(factors) - 1)]
        )

    def schedule_rate(self) -> None:
        """Leave it to the scheduler."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        report = super().step(batch)
        self.schedule.step()
        return report

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])


class NoDecayOfNorms(Plain):
    """Two groups of parameters, which the class states."""

    stated_plan: ClassVar = {
        "parameter_groups": {
            NORMS: {"weight_decay": 0.0},
            "*": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
        }
    }

    def build_optimizer(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for name, one in named.items() if "norm" in name], "weight_decay": 0.0},
            {"params": [one for name, one in named.items() if "norm" not in name]},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, weight_decay=0.1, betas=(0.9, 0.95))


class StepsInBackward(SumsLosses):
    """A hook updates each parameter as its gradient is complete, and nothing is clipped.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """

    stated_plan: ClassVar = {"max_grad_norm": math.inf}

    def prepare(self) -> None:
        self.of_parameters: list[torch.optim.Optimizer] = []
        rates = {p: group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            one = torch.optim.AdamW([parameter], lr=rates[parameter], foreach=False)
            one.state = self.optimizer.state
            self.of_parameters.append(one)
            parameter.register_post_accumulate_grad_hook(self.updating(one))

    def updating(self, one: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            if self.fault == "clip" and parameter.grad is not None:
                parameter.grad.mul_(parameter.ndim)
            one.state = self.optimizer.state
            one.step()
            one.zero_grad()

        return update

    def schedule_rate(self) -> None:
        if self.fault == "schedule":
            for one in self.of_parameters:
                one.param_groups[0]["lr"] = self.rate

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        return self.report(*self.accumulate(batch), math.nan)


class ClipsByItself(Plain):
    """The norm of the norms, and one multiplication."""

    def clip(self) -> float:
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        norm = torch.stack([one.float().norm() for one in gradients]).norm()
        if norm > self.max_norm:
            for one in gradients:
                one.mul_(self.max_norm / norm)
        return float(norm)


class _ClippingAdamW(torch.optim.AdamW):
    max_norm = 1.0

    def step(self, closure: Any = None) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.max_norm)
        return super().step(closure)


class ClipsInTheOptimizer(Plain):
    """The optimizer's step clips first."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = _ClippingAdamW(self.model.parameters(), lr=self.rate)
        optimizer.max_norm = self.max_norm
        return optimizer

    def clip(self) -> float:
        return math.nan


class ScalesTheLoss(Plain):
    """GradScaler, as its documentation shows it."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def backward_of(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        self.optimizer.zero_grad()
        total, num_tokens = self.accumulate(batch)
        self.scaler.unscale_(self.optimizer)
        norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.report(total, num_tokens, norm)


class Fused(Plain):
    """AdamW in one kernel."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=True)


class Compiled(Plain):
    """Loss and model are compiled together."""

    def prepare(self) -> None:
        self.compiled = torch.compile(super().loss, backend="aot_eager")

    def loss(self, micro_batch: MicroBatch, num_tokens: int) -> Tensor:
        return self.compiled(micro_batch, num_tokens)


STYLES = tuple(
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Plain) and not name.startswith("_")
)


def __getattr__(name: str) -> type:
    style, _, fault = name.partition("__")
    if style not in STYLES or fault not in FAULTS:
        raise AttributeError(name)
    return type(name, (globals()[style],), {"fault": fault})
