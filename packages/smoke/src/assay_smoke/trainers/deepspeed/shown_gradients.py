"""Shows whole gradients in `.grad`, which DeepSpeed leaves empty."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Shown:
    """A copy of the gradient that was put into `.grad`, and DeepSpeed's own before it."""

    copy: Tensor
    before: Tensor | None


@dataclass
class ShownGradients:
    """Puts whole gradients into `.grad` of `parameters` for others to read and change.

    DeepSpeed does not run between `show` and `hide`. An unchanged gradient is not written back, since
    DeepSpeed's own may be more precise.
    """

    parameters: Sequence[nn.Parameter]
    _shown: dict[nn.Parameter, _Shown] = field(default_factory=dict)

    def show(self, read: Callable[[nn.Parameter], Tensor]) -> None:
        """Put the result of `read` into the `.grad` of each parameter."""
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
        """Restore `.grad`, then call `write` with the gradients that were changed."""
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
