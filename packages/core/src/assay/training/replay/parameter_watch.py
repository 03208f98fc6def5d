"""Watches gradients, updates and moments of all parameters in the phases of a step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.hooks.suspension import suspended_modes
from assay.sites import CallSite, Phase
from assay.stages import Stage
from assay.statistics import worst_error
from assay.training.protocol import PHASE_METHODS, Trainer
from assay.training.replay.step_values import (
    COUNT,
    NORM,
    StepValueHandler,
    ValueAddress,
    address_of,
)
from assay.training.reports import GradientFindings, GradientNorm, GradientShare, MovedElements
from assay.training.state.files import fingerprint
from assay.training.state.parameters import (
    NamedParameter,
    PartialSums,
    in_blocks,
    local_part,
    named_parameters,
    put,
    untrained_values,
    whole,
)
from assay.training.state.states import fits

# Number of sampled elements per parameter, by which the shares of backward passes are solved.
_NUM_SAMPLED = 512

# Rounding the values to bfloat16 changes their norm by at most its unit roundoff.
_SAME_NORM = 2.0**-8

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


_ORDER = list(PHASE_METHODS)

# The share of a rank is the same in all parameters only if its whole part is missing or weighted.
_MOST_SPREAD = 0.5


@dataclass
class ObservedGradients:
    """Passes the gradients after each phase to a handler, once per step, and injects its answer."""

    handler: StepValueHandler
    late: frozenset[str]
    """Phases whose work may not be finished when their method ends."""
    found: GradientFindings
    _step: int = 0
    _last: Phase = "forward"
    _first_norm: float = math.nan

    def begin_step(self, step: int) -> None:
        """Forget the phases of the previous step."""
        self._step, self._last, self._first_norm = step, "forward", math.nan

    def end_micro_batch(self, model: nn.Module) -> None:
        """Note the norm after the first backward pass of a step."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # The norm of sharded gradients is a collective, which hangs if a rank lacks one of them.
        sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
        if math.isnan(self._first_norm) and not sharded:
            self._first_norm = math.sqrt(sum(map(_square, gradients)))

    def is_next(self, phase: Phase) -> bool:
        """Return True if `phase` is visible and was not observed in this step."""
        return phase not in self.late and _ORDER.index(phase) > _ORDER.index(self._last)

    def last_phase(self, model: nn.Module, norm: Tensor | None) -> Phase:
        """Return the phase that the gradients come from by their norm: "clip", or "backward" before it.

        A step that the reference does not clip has the same gradients in both.
        norm: the reference's before clipping.
        """
        if norm is None:
            return "backward"
        addresses = self.handler.expected("clip")
        values = [self.handler.find(one) for one in addresses if one.port != NORM]
        clipped = math.sqrt(sum(_square(value) for value in values if value is not None))
        factor = self.handler.loss_scale.of_gradients
        found = math.sqrt(sum(_square(value) for *_, value in self._gradients(model, "clip")))
        before = [float(norm), float(norm) * factor]
        if not (found and clipped) or abs(clipped / float(norm) - 1) < _SAME_NORM:
            return "clip"
        distances = [abs(math.log(found / one)) for one in (clipped, *before)]
        return "clip" if distances[0] == min(distances) else "backward"

    def observe(self, model: nn.Module, phase: Phase) -> None:
        """Observe gradients as `phase` has ended or a later phase begins."""
        if not self.is_next(phase):
            return
        self._last = phase
        factor = self._find_factor(model, phase)
        found = injected = 0.0
        parts = self.handler.scope.partial if phase == "reduce" else None
        by_owner: list[Tensor] = []
        for address, parameter, gradient in self._gradients(model, phase):
            sums = self._sums_of(phase)
            value = whole(gradient.detach())
            found += _square(value)
            value = value if sums is None else sums.total(value)
            expected = self.handler.find(address) if parts is not None else None
            if parts is not None and expected is not None and expected.shape == value.shape:
                pair = value.cpu().double() / factor, expected.double()
                by_owner.append(parts.products_by_owner(*pair))
            new = self.handler.observe(address, value if factor == 1 else value.double() / factor)
            if self.handler.loss_scale.has_overflown(value):
                continue
            new = new if factor == 1 else new * factor
            if sums is not None:
                new = sums.share(new, gradient.dtype)
            injected += _square(new)
            if parameter.grad is None:
                parameter.grad = gradient
            if (observer := self.handler.observer) is not None:
                observer.overwrite(parameter.grad)
            put(parameter.grad, new)
            if observer is not None:
                observer.inject(
                    CallSite(self._step, address.stage.module), address.port, parameter.grad
                )
        self.found.rank_shares += [
            GradientShare(self._step, *one) for one in enumerate(shares_of_ranks(by_owner))
        ]
        norms = math.sqrt(found), math.sqrt(injected)
        self.found.norms.append(GradientNorm(self._step, phase, self._first_norm, *norms))

    def _gradients(
        self, model: nn.Module, phase: Phase
    ) -> Iterator[tuple[ValueAddress, nn.Parameter, Tensor]]:
        """Yield each parameter's gradient; zeros if the reference has one that was never computed."""
        wanted = {(address.stage.module, address.port) for address in self.handler.expected(phase)}
        for item in named_parameters(model):
            address, parameter = address_of(item, phase, "gradient"), item.tensor
            if parameter.grad is not None:
                yield address, parameter, parameter.grad
            elif (address.stage.module, address.port) in wanted:
                yield address, parameter, torch.zeros_like(parameter)

    def _sums_of(self, phase: Phase) -> PartialSums | None:
        """Return the sums over ranks of which gradients after `phase` are parts; None if whole."""
        return self.handler.scope.partial if phase == "backward" else None

    def _find_factor(self, model: nn.Module, phase: Phase) -> float:
        """Return the factor of all gradients after `phase`, 1 once the loss scale is removed."""
        if self.handler.loss_scale.unit is None:
            return 1.0
        pairs, sums = [], self._sums_of(phase)
        for address, _, gradient in self._gradients(model, phase):
            value = whole(gradient.detach())
            value = value if sums is None else sums.total(value)
            expected = self.handler.find(address)
            if expected is not None and expected.shape == value.shape:
                pairs.append((value, expected))
        self.handler.loss_scale.end_phase(phase, pairs)
        return self.handler.loss_scale.of_gradients


def shares_of_ranks(by_owner: list[Tensor]) -> list[float]:
    """Return the share of each rank in all gradients; 1 if it differs between parameters.

    by_owner: for each parameter the sums of `PartialSums.products_by_owner`, (2, ranks).
    """
    if not by_owner:
        return []
    of_parameters = torch.stack(by_owner)
    products, squares = of_parameters.sum(0)
    each = (of_parameters[:, 0] / of_parameters[:, 1]).nan_to_num(1.0)
    spread = each.amax(0) - each.amin(0)
    return torch.where(spread > _MOST_SPREAD, 1.0, (products / squares).nan_to_num(1.0)).tolist()


def _square(value: Tensor) -> float:
    parts = in_blocks(whole(value.detach()))
    return sum(float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2 for (one,) in parts)


@dataclass
class UpdateWatch:
    """Passes the changes of a trainer's step to a handler.

    Call `begin_step` before the step, `observe_updates` after the optimizer's part of it, and
    `end_step` after the step.
    """

    trainer: Trainer
    handler: StepValueHandler
    untrained: frozenset[str] | None = None
    """Buffers and frozen parameters that must change as in the reference; None for all."""
    moved: MovedElements = field(default_factory=MovedElements)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _untrained_before: dict[str, str] = field(default_factory=dict)
    # Each parameter after the optimizer's step, with hashes of this rank's part of it and of each moment.
    _after: list[tuple[NamedParameter, dict[str, str]]] = field(default_factory=list)

    def trained(self) -> list[NamedParameter]:
        """List the parameters with `requires_grad`."""
        return [item for item in named_parameters(self.trainer.model) if item.tensor.requires_grad]

    def begin_step(self) -> None:
        """Copy the values before the step."""
        with suspended_modes():
            self._before = {item.name: _copy(item.tensor) for item in self.trained()}
            self._untrained_before = self._hash_untrained()

    def observe_updates(self, parameters: list[NamedParameter]) -> None:
        """Pass the change of each parameter since `begin_step`, and its moments, to the handler."""
        with suspended_modes():
            if self._lack_moments_on_some_ranks(parameters):
                self.trainer.optimizer.state.clear()
            self._after = [(item, self._hash_stepped(item.tensor)) for item in parameters]
            for item in parameters:
                # Since the start of the step, so that any earlier change counts as update.
                value = whole(item.tensor.detach())
                self.handler.show(item, self._before[item.name])
                update = value.to(torch.float64, copy=True).sub_(self._before[item.name])
                expected = observe_update(self.handler, item, update, self._state_of(item.tensor))
                if expected is not update:
                    self._count_moved(update, expected)

    def end_step(self) -> None:
        """Pass later changes of parameters, and changes of untrained values, to the handler."""
        with suspended_modes():
            for item, hashes in self._after:
                # Only the optimizer may change a trained parameter or its moments.
                self.handler.show(item, self._before[item.name], "changed-later")
                changed = _num_unequal(hashes, self._hash_stepped(item.tensor))
                address = address_of(item, "optimizer", "changed-later")
                self.handler.observe(address, torch.tensor([changed]))
            address = ValueAddress(Stage("", "optimizer"), "changed-untrained")
            num_changed = _num_unequal(self._untrained_before, self._hash_untrained())
            self.handler.observe(address, torch.tensor([num_changed]))
        self._after.clear()
        self._before.clear()

    def _count_moved(self, actual: Tensor, expected: Tensor) -> None:
        for own, other in in_blocks(actual.to(expected.device), expected):
            changes = other != 0
            self.moved.num_expected += int(changes.count_nonzero())
            self.moved.num_moved += int((changes & (own != 0)).count_nonzero())

    def _lack_moments_on_some_ranks(self, parameters: list[NamedParameter]) -> bool:
        """Return True if some ranks lack moments of their parameters, and others have theirs.

        Gathering moments would then hang, here or before the next step. They are dropped, and each
        counts as missing.
        """
        if not dist.is_initialized():
            return False
        own = any(self._state_of(item.tensor) for item in parameters) if parameters else None
        of_ranks: list[bool | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        return {True, False} <= {*of_ranks}

    def _state_of(self, parameter: Tensor) -> Mapping[str, object]:
        state: Mapping[str, object] = self.trainer.optimizer.state.get(parameter, {})
        return state

    def _hash_stepped(self, parameter: Tensor) -> dict[str, str]:
        kept = {"": parameter.detach(), **self._state_of(parameter)}
        return fingerprint({name: _local(value) for name, value in kept.items()})

    def _hash_untrained(self) -> dict[str, str]:
        """Hash the values that the reference does not train; a trainer's own counters may change."""
        values = untrained_values(self.trainer.model)
        return fingerprint(
            {
                name: _local(value.detach())
                for name, value in values.items()
                if self.untrained is None or name in self.untrained
            }
        )


def observe_update(
    handler: StepValueHandler, item: NamedParameter, update: Tensor, moments: Mapping[str, object]
) -> Tensor:
    """Pass the update of one parameter and its moments to the handler; return the reference's update."""
    expected = handler.observe(address_of(item, "optimizer", "update"), update)
    for name, value in moments.items():
        if isinstance(value, Tensor) and value.ndim:
            handler.observe(address_of(item, "optimizer", name), whole(value))
        elif isinstance(value, Tensor | int | float):
            count = torch.tensor([round(float(value))])
            handler.observe(address_of(item, "optimizer", f"{COUNT}{name}"), count)
    return expected


def _copy(parameter: Tensor) -> Tensor:
    return whole(parameter.detach()).clone()


def _local(value: object) -> object:
    return local_part(value) if isinstance(value, Tensor) else value


def _num_unequal(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    return sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
