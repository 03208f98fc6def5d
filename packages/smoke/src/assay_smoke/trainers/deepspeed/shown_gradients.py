"""Whole gradients in `.grad`, which DeepSpeed empties for its own use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Shown:
    """What was put into `.grad` of a parameter, a copy, and what DeepSpeed had there before."""

    copy: Tensor
    before: Tensor | None


@dataclass
class ShownGradients:
    """Puts whole gradients into `.grad` of `parameters`, for others to read and to change.

    DeepSpeed does not run between `show` and `hide`. A gradient that nobody has changed is not given
    back to it: its own may have more digits.
    """

    parameters: Sequence[nn.Parameter]
    _shown: dict[nn.Parameter, _Shown] = field(default_factory=dict)

    def show(self, read: Callable[[nn.Parameter], Tensor]) -> None:
        """Put what `read` gives for each parameter into its `.grad`."""
        for parameter in self.parameters:
            value = read(parameter)
            before, parameter.grad = parameter.grad, None
            if hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = value.dtype
            else:  # before torch 2.10 a gradient has its parameter's dtype
                value = value.to(parameter.dtype)
            parameter.grad = value
            self._shown[parameter] = _Shown(value.clone(), before)

    def hide(self, write: Callable[[nn.Parameter, Tensor], None] | None = None) -> None:
        """Leave `.grad` as it was before `show`, then call `write` with what was changed meanwhile."""
        shown, self._shown = self._shown, {}
        changed = []
        for parameter, one in shown.items():
            value = parameter.grad
            if value is not None and not torch.equal(value, one.copy):
                changed.append((parameter, value))
            parameter.grad = None
            if hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = parameter.dtype
            parameter.grad = one.before
        if write is not None:
            for parameter, value in changed:
                write(parameter, value.float())
