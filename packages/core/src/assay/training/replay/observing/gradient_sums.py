"""Whether `.grad` is the sum of what the backward passes of a step gave each parameter."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from assay.hooks.suspension import suspended_modes
from assay.training.state.parameters import NamedParameter
from assay.training.state.precision import fits
from assay.training.state.sharding import PartialSums, local_part, whole


@dataclass(slots=True)
class _Sum:
    """What was given to one parameter so far: added up, and the sum of its squares."""

    total: Tensor
    squares: float


@dataclass
class GradientSums:
    """Adds up, beside the trainer, what each backward pass gives each parameter.

    `begin_step` comes before the first backward pass of a step, `compare` after the last one,
    before anything else changes the gradients.

    narrow: the dtype that the run computes in; None where it is not known.
    over_ranks: where `.grad` is a sum over ranks when it is compared, or their mean; None where it is
        this process's own.
    errors: by parameter the largest error of a step's sum, relative to the root of the squares of
        what was summed. Parameters of a sharded model are not among them: autograd gives their
        gradients to what was gathered.
    num_sharded: elements of their gradients that are not zero; num_narrow: those that lose nothing in
        the dtype `narrow`, as few sums of several values do.
    """

    narrow: torch.dtype | None = None
    over_ranks: PartialSums | None = None
    errors: dict[str, float] = field(default_factory=dict)
    num_sharded: int = 0
    num_narrow: int = 0
    _given: dict[str, _Sum] = field(default_factory=dict)
    _handles: list[Callable[[], None]] = field(default_factory=list)

    def begin_step(self, parameters: list[NamedParameter]) -> None:
        """Listen to what autograd gives each of `parameters`."""
        self._forget()
        for item in parameters:
            if not isinstance(item.tensor, DTensor):
                handle = item.tensor.register_hook(self._listener(item.name))
                self._handles.append(handle.remove)

    def compare(self, parameters: list[NamedParameter]) -> None:
        """Compare the `.grad` of each of `parameters` with what it was given in this step."""
        for item in parameters:
            if isinstance(item.tensor, DTensor):
                self._count_sharded(item.tensor.grad)
                continue
            given = self._given.get(item.name)
            if self.over_ranks is None and given is None:
                continue
            error = self._error_of(item.tensor, given)
            self.errors[item.name] = max(self.errors.get(item.name, 0.0), error)
        self._forget()

    def _listener(self, name: str) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            with suspended_modes():
                value = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
                square = float(value.double().square().sum())
                known = self._given.get(name)
                if known is None:
                    self._given[name] = _Sum(value.clone(), square)
                else:
                    known.total += value
                    known.squares += square

        return add

    def _error_of(self, parameter: Tensor, given: _Sum | None) -> float:
        if given is None:
            given = _Sum(torch.zeros_like(parameter, dtype=torch.float32), 0.0)
        total, squares, num_ranks = given.total, given.squares, 1
        if self.over_ranks is not None:
            total = self.over_ranks.total(total)
            squares = float(self.over_ranks.total(torch.tensor(squares, dtype=torch.float64)))
            num_ranks = self.over_ranks.num_ranks
        actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # In double precision: the sums may be in float32 themselves. A reduction may take the mean.
        value = whole(actual.detach()).to(total.device).double()
        errors = [
            float((factor * value - total.double()).square().sum()) for factor in {1, num_ranks}
        ]
        return (min(errors) / squares) ** 0.5 if squares else float(min(errors) > 0)

    def _count_sharded(self, gradient: Tensor | None) -> None:
        if gradient is None or self.narrow is None:
            return
        own = local_part(gradient.detach())
        own = own[own != 0]
        self.num_sharded += own.numel()
        self.num_narrow += int(fits(own, self.narrow).sum())

    def _forget(self) -> None:
        for remove in self._handles:
            remove()
        self._handles.clear()
        self._given.clear()
