"""Checks that `.grad` is the sum of the gradients from the backward passes of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from assay.hooks.suspension import suspended_modes
from assay.statistics import worst_error
from assay.training.replay.observing.findings import GradientFindings
from assay.training.state.parameters import NamedParameter, in_blocks
from assay.training.state.precision import fits
from assay.training.state.sharding import PartialSums, local_part, whole

# Number of sampled elements per parameter, by which the shares of backward passes are solved.
_NUM_SAMPLED = 512

# Largest relative residual at which a gradient still counts as a sum of shares.
_LARGEST_REST = 0.02


@dataclass(slots=True)
class _Sum:
    """Gradients of one parameter so far."""

    total: Tensor
    squares: float
    samples: dict[int, Tensor]
    """Sampled elements by number of the backward pass; number -1 was there before the first one."""


@dataclass
class GradientSums:
    """Independent sums of the gradients that backward passes compute for each parameter.

    Call `begin_step` before the first backward pass of a step, `end_pass` after each pass that is
    visible, and `compare` after the last one, before anything else changes the gradients.
    """

    narrow: torch.dtype | None = None
    """Compute dtype of the run, if known."""
    over_ranks: PartialSums | None = None
    """Set if `.grad` is a sum or mean over these ranks when it is compared."""
    micro_batches_begun: Callable[[], Sequence[int]] = tuple
    """Returns the micro-batches whose gradients have arrived since the last visible pass."""
    found: GradientFindings = field(default_factory=GradientFindings)
    in_sum: dict[int, float] = field(default_factory=dict)
    """Weight of each micro-batch of the last step in `.grad`, from a least-squares fit.

    Empty if `.grad` is not such a sum, or contains parts of other ranks.
    """
    kept: tuple[float, list[str]] = (0.0, [])
    """Weight of what `.grad` held before the first pass, and the parameters where it held anything."""
    _passes: list[tuple[int, ...]] = field(default_factory=list)
    _given: dict[str, _Sum] = field(default_factory=dict)
    _begun: tuple[int, ...] = ()
    _after_pass: dict[str, Tensor] = field(default_factory=dict)
    _handles: list[Callable[[], None]] = field(default_factory=list)

    def begin_step(self, parameters: list[NamedParameter]) -> None:
        """Register hooks that collect the gradients of `parameters`."""
        self._forget()
        self.in_sum, self.kept = {}, (0.0, [])
        for item in parameters:
            if not isinstance(item.tensor, DTensor):
                handle = item.tensor.register_hook(partial(self._add, item))
                self._handles.append(handle.remove)

    def end_pass(self, parameters: Sequence[NamedParameter] = ()) -> None:
        """Note the micro-batches of a backward pass as it ends, and the gradients of `parameters`."""
        self._passes.append(tuple(self.micro_batches_begun()))
        self._begun = ()
        self._after_pass = {
            one.name: _sample(one.tensor.grad)
            for one in parameters
            if one.name in self._given and one.tensor.grad is not None
        }

    @property
    def num_passed(self) -> int:
        """Number of micro-batches in the backward passes of the step so far."""
        return sum(map(len, self._passes))

    @property
    def has_gradients(self) -> bool:
        """Return True if the step computed a gradient that `compare` has not seen yet."""
        return bool(self._given)

    def _solve(self, parameters: list[NamedParameter]) -> None:
        """Fit the weights of all passes, and of earlier gradients, in `.grad`."""
        given = [
            (one.tensor, self._given[one.name]) for one in parameters if one.name in self._given
        ]
        if self.over_ranks is not None or not given or not self._passes:
            return
        zero = torch.zeros((), dtype=torch.float64)
        numbers = [-1, *range(len(self._passes))]
        columns = [
            torch.cat([one.samples.get(number, zero).expand(_num_sampled(p)) for p, one in given])
            for number in numbers
        ]
        sums = [
            zero.expand(_num_sampled(p)) if p.grad is None else _sample(p.grad) for p, _ in given
        ]
        matrix, total = torch.stack(columns, 1), torch.cat(sums)
        if not bool((matrix.isfinite().all(1) & total.isfinite()).all()):
            return
        found = torch.linalg.lstsq(matrix, total[:, None], driver="gelsd").solution[:, 0]
        if float((matrix @ found - total).norm()) > _LARGEST_REST * float(matrix.norm()):
            return
        before, *weights = found.tolist()
        self.in_sum = {
            micro_batch: weight
            for weight, column, passed in zip(weights, columns[1:], self._passes, strict=True)
            if bool(column.any())
            for micro_batch in passed
        }
        names = (n for n, one in self._given.items() if bool(one.samples.get(-1, zero).any()))
        self.kept = before, sorted(names)

    def compare(self, parameters: list[NamedParameter], *, is_clipped: bool = False) -> None:
        """Compare the `.grad` of each parameter with the sum of its gradients in this step.

        is_clipped: one unknown factor multiplies all sums.
        """
        if self._begun:
            self._end_hidden_pass()
        self._solve(parameters)
        if is_clipped:
            largest = max(map(abs, self.in_sum.values()), default=0.0) or 1.0
            self.in_sum = {number: one / largest for number, one in self.in_sum.items()}
            self.kept = self.kept[0] / largest, self.kept[1]
            self._after_pass = self._expect_clipped(parameters)
        for item in parameters:
            given = self._given.get(item.name)
            if isinstance(item.tensor, DTensor):
                self._count_sharded(item.tensor.grad)
            elif not is_clipped and (self.over_ranks is not None or given is not None):
                error = self._error_of(item.tensor, given)
                _note_worst(self.found.errors_of_sums, item.name, error)
            self._note_change(item)
        self._forget()

    def _expect_clipped(self, parameters: list[NamedParameter]) -> dict[str, Tensor]:
        """Sample the sums times the factor that most parameters have in common."""
        totals = {name: _sample(one.total) for name, one in self._given.items()}
        given = [(totals.get(one.name), one.tensor.grad) for one in parameters]
        factors = [
            float(total @ _sample(gradient) / total.square().sum())
            for total, gradient in given
            if gradient is not None and total is not None and bool(total.any())
        ]
        return {name: median(factors) * total for name, total in totals.items()} if factors else {}

    def _note_change(self, item: NamedParameter) -> None:
        before = self._after_pass.get(item.name)
        if before is None:
            return
        now = torch.zeros_like(before) if item.tensor.grad is None else _sample(item.tensor.grad)
        change = float((now - before).norm() / before.norm()) if bool(before.any()) else 0.0
        if not change <= _LARGEST_REST:
            _note_worst(self.found.changed, item.name, change)

    def _add(self, item: NamedParameter, gradient: Tensor) -> None:
        with suspended_modes():
            value = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
            known = self._given.get(item.name)
            if known is None:
                known = self._given[item.name] = _Sum(torch.zeros_like(value), 0.0, {})
                if item.tensor.grad is not None:
                    known.samples[-1] = _sample(item.tensor.grad)
            begun = tuple(self.micro_batches_begun())
            if len(self._passes) in known.samples and begun != self._begun:
                self._end_hidden_pass()
            self._begun = begun
            known.total += value
            known.squares += sum(float(one.double().square().sum()) for (one,) in in_blocks(value))
            number = len(self._passes)
            known.samples[number] = known.samples.get(number, 0) + _sample(value)

    def _end_hidden_pass(self) -> None:
        """End a pass that no method shows: a parameter gets a gradient of another micro-batch."""
        done = {number for passed in self._passes for number in passed}
        self._passes.append(tuple(number for number in self._begun if number not in done))

    def _error_of(self, parameter: Tensor, given: _Sum | None) -> float:
        if given is None:
            given = _Sum(torch.zeros_like(parameter, dtype=torch.float32), 0.0, {})
        total, squares, num_ranks = given.total, given.squares, 1
        if self.over_ranks is not None:
            total = self.over_ranks.total(total)
            squares = float(self.over_ranks.total(torch.tensor(squares, dtype=torch.float64)))
            num_ranks = self.over_ranks.num_ranks
        actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        value = whole(actual.detach()).to(total.device)
        # In float64, because the sums may be in float32. A reduction may take the mean.
        errors = [
            sum(
                float((factor * one.double() - sum_.double()).square().sum())
                for one, sum_ in in_blocks(value, total)
            )
            for factor in {1, num_ranks}
        ]
        return (min(errors) / squares) ** 0.5 if squares else float(min(errors) != 0)

    def _count_sharded(self, gradient: Tensor | None) -> None:
        if gradient is None or self.narrow is None:
            return
        own = local_part(gradient.detach())
        own = own[own != 0]
        self.found.sharded_gradients += own.numel()
        self.found.narrow_gradients += int(fits(own, self.narrow).sum())

    def _forget(self) -> None:
        for remove in self._handles:
            remove()
        self._handles.clear()
        self._given.clear()
        self._passes.clear()
        self._begun = ()
        self._after_pass.clear()


def _note_worst(errors: dict[str, float], name: str, error: float) -> None:
    errors[name] = worst_error([errors.get(name, 0.0), error])


def _sample(value: Tensor) -> Tensor:
    """Sample elements of `value` in float64, at positions that depend only on its shape."""
    return value.detach().flatten()[:: _stride(value)].cpu().double()


def _num_sampled(value: Tensor) -> int:
    return -(-value.numel() // _stride(value))


def _stride(value: Tensor) -> int:
    return max(1, -(-value.numel() // _NUM_SAMPLED))
