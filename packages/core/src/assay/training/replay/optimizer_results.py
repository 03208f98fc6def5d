"""Updates and moments of AdamW, computed again from state and gradients instead of stored in a golden."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from assay.errors import MachineError
from assay.training.protocol import TrainingPlan
from assay.training.replay.stage_values import ValueAddress, dtype_of
from assay.training.state.parameters import in_blocks
from assay.training.state.states import State

_UPDATE = "update"
_MOMENTS = ("exp_avg", "exp_avg_sq")

# As they are before any code of a candidate runs in its process, which may replace methods of tensors.
_add, _mul, _div, _sqrt = Tensor.add, Tensor.mul, Tensor.div, Tensor.sqrt
_lerp, _addcmul, _addcdiv = Tensor.lerp, Tensor.addcmul, Tensor.addcdiv
_norm, _sum = torch.linalg.vector_norm, Tensor.sum

# Largest difference of a norm and a sum that other kernels may make; a wrong operation makes a larger one.
_SAME_SUMS = 1e-6


@dataclass
class OptimizerResults:
    """Computes the update and the moments of each parameter in one step."""

    plan: TrainingPlan
    """The yardstick's."""
    step: int
    read_state: Callable[[], State]
    """Read the state before the step."""
    gradient_of: Callable[[str, str], Tensor | None]
    """Return the gradient after clipping, by the module and the parameter's name in it."""
    # Name and results of the parameter that was asked for last.
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
        settings = self.plan.settings_of(name, self.step)
        weight, made = step_adamw(before, gradient, moments, settings, dtype_of(self.plan))
        update = weight.double().sub_(before)
        return {_UPDATE: update} | {moment: made[moment] for moment in _MOMENTS}


def step_adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weight after a step of AdamW in `dtype`, and its moments, without side effects.

    It is computed as torch.optim.AdamW does, but not by it: in the process of a candidate that class may
    be patched.

    moments: those before the step; empty at the first.
    settings: `lr`, `betas`, `eps` and `weight_decay`.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
    """
    if moments:
        step = moments["step"].to(torch.float32) + 1
    else:
        step = torch.ones((), dtype=torch.float32, device="cpu")
        moments = dict.fromkeys(_MOMENTS, torch.zeros_like(weight, dtype=dtype))
    learning_rate, betas = settings["lr"], settings["betas"]
    corrections = [1 - beta ** float(step) for beta in betas]
    results = [torch.empty(weight.shape, dtype=dtype, device=weight.device) for _ in range(3)]
    known = weight.detach(), gradient.detach(), *(moments[name] for name in _MOMENTS)
    for block in in_blocks(*known, *results):
        wide, grad, first, second = (one.to(dtype) for one in block[:4])
        wide = _mul(wide, 1 - learning_rate * settings["weight_decay"])
        first = _lerp(first, grad, 1 - betas[0])
        second = _addcmul(_mul(second, betas[1]), grad, grad, value=1 - betas[1])
        divisor = _add(_div(_sqrt(second), corrections[1] ** 0.5), settings["eps"])
        wide = _addcdiv(wide, first, divisor, value=-learning_rate / corrections[0])
        for result, part in zip(block[4:], (wide, first, second), strict=True):
            result.copy_(part)
    return results[0], {"step": step, **dict(zip(_MOMENTS, results[1:], strict=True))}


def sums_of(value: Tensor) -> tuple[float, float]:
    """Return norm and sum, by which a value is recognized when it is computed again."""
    wide = (one.double() for (one,) in in_blocks(value))
    norms, totals = zip(*((float(_norm(one)), float(_sum(one))) for one in wide), strict=True)
    return math.hypot(*norms), sum(totals)


def require_sums(address: ValueAddress, value: Tensor, expected: tuple[float, float]) -> None:
    """Raise MachineError if `value`, computed again, has other sums than it had when it was recorded."""
    norm, total = sums_of(value)
    allowed = _SAME_SUMS * expected[0]
    # The sum of n random numbers differs by the root of n; NaN is a difference.
    is_same = (
        abs(norm - expected[0]) <= allowed
        and abs(total - expected[1]) <= allowed * value.numel() ** 0.5
    )
    if not is_same:
        raise MachineError(
            f"{address.stage.module}:{address.port} is not what AdamW made of it in the reference: code"
            " of the candidate, or a package that it loads, changes the arithmetic of the host"
        )
