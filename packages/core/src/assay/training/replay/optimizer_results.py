"""What AdamW makes of the state before a step and its gradients, so that a golden need not hold it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from assay.training.protocol import ADAMW_EPS
from assay.training.replay.stage_values import ValueAddress, YardstickRules
from assay.training.state.states import State

_UPDATE = "update"
_MOMENTS = ("exp_avg", "exp_avg_sq")

# Defaults of torch.optim.AdamW.
_BETAS, _WEIGHT_DECAY = (0.9, 0.999), 0.01


@dataclass
class OptimizerResults:
    """What AdamW makes of each parameter in one step."""

    rules: YardstickRules
    read_state: Callable[[], State]
    """Read the state before the step."""
    gradient_of: Callable[[str, str], Tensor | None]
    """Return the clipped gradient that is injected, by module and name of the parameter in it."""
    # Of the parameter that was asked for last.
    _latest: tuple[str, dict[str, Tensor]] = field(default=("", {}))

    def find(self, address: ValueAddress) -> Tensor | None:
        """Return an update or a moment, exact; None for other values and without a gradient."""
        what, _, short = address.port.partition(".")
        if address.stage.phase != "optimizer" or what not in (_UPDATE, *_MOMENTS):
            return None
        module = address.stage.module
        name = f"{module}.{short}" if module else short
        if self._latest[0] != name:
            self._latest = name, self._compute(name, self.gradient_of(module, short))
        return self._latest[1].get(what)

    @cached_property
    def _state(self) -> State:
        return self.read_state()

    def _compute(self, name: str, gradient: Tensor | None) -> dict[str, Tensor]:
        if gradient is None or name not in self._state["model"]:
            return {}
        before, moments = self._state["model"][name], self._state["moments"].get(name, {})
        dtype = getattr(torch, self.rules.dtype)
        weight, made = step_adamw(before, gradient, moments, self.rules.learning_rate, dtype)
        update = weight.double() - before.double()
        return {_UPDATE: update} | {name: made[name] for name in _MOMENTS}


def step_adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    learning_rate: float,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weight after a step of AdamW in `dtype`, and its moments, without side effects.

    It is computed as torch.optim.AdamW does with its default options, but not by it: in the process of a
    candidate that class may be patched.

    moments: those before the step; empty at the first.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
    """
    wide, gradient = weight.detach().to(dtype, copy=True), gradient.detach().to(dtype)
    if moments:
        step = moments["step"].to(torch.float32) + 1
        first, second = (moments[name].to(dtype, copy=True) for name in _MOMENTS)
    else:
        step = torch.ones((), dtype=torch.float32, device="cpu")
        first, second = torch.zeros_like(wide), torch.zeros_like(wide)
    wide.mul_(1 - learning_rate * _WEIGHT_DECAY)
    first.lerp_(gradient, 1 - _BETAS[0])
    second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
    corrections = [1 - beta ** float(step) for beta in _BETAS]
    divisor = (second.sqrt() / corrections[1] ** 0.5).add_(ADAMW_EPS)
    wide.addcdiv_(first, divisor, value=-learning_rate / corrections[0])
    return wide, {"step": step, _MOMENTS[0]: first, _MOMENTS[1]: second}
