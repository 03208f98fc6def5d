"""What AdamW makes of the state before a step and its gradients, so that a golden need not hold it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from assay.training.replay.stage_values import ValueAddress, YardstickRules
from assay.training.state.states import State

_UPDATE = "update"
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        update = weight.detach().double() - before.double()
        return {_UPDATE: update} | {name: made[name] for name in _MOMENTS}


def step_adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    learning_rate: float,
    dtype: torch.dtype,
) -> tuple[nn.Parameter, dict[str, Tensor]]:
    """Return a parameter after a step of AdamW in `dtype`, and its moments, without side effects."""
    wide = nn.Parameter(weight.detach().to(dtype, copy=True))
    wide.grad = gradient.to(dtype)
    optimizer: Any = torch.optim.AdamW([wide], lr=learning_rate)
    if moments:
        optimizer.state[wide] = {
            name: value.to(dtype if value.ndim else torch.float32, copy=True)
            for name, value in moments.items()
        }
    optimizer.step()
    return wide, optimizer.state[wide]
