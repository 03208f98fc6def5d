"""The gradients of all parameters after each phase of a step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.locating.loss_scale import LossScale
from assay.sites import Phase
from assay.training.protocol import PHASE_METHODS
from assay.training.replay.observing.gradient_sums import GradientShare
from assay.training.replay.rank_view import RankView
from assay.training.replay.stage_values import StepValueHandler, ValueAddress, address_of
from assay.training.state.parameters import named_parameters
from assay.training.state.sharding import PartialSums, put, whole

_ORDER = list(PHASE_METHODS)

# A rank's part is missing or weighted as a whole only if its share is about the same in all parameters.
_MOST_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Global norms of the gradients that a process holds after a phase.

    first: after the first micro-batch of the step; nan where no method shows it, or they are sharded.
    found: as the phase left them; injected: as the next one gets them.
    """

    step: int
    phase: Phase
    first: float
    found: float
    injected: float


@dataclass
class ObservedGradients:
    """A source of gradients for a handler after each phase, once per step, that injects its results.

    late: phases whose work is unfinished when their method ends.
    norms: gradient norms of every phase of every observed step.
    rank_shares: how often each rank's part is in the reduced gradients.
    """

    handler: StepValueHandler
    rank_view: RankView | None
    loss_scale: LossScale | None
    late: frozenset[str]
    norms: list[GradientNorm] = field(default_factory=list)
    rank_shares: list[GradientShare] = field(default_factory=list)
    _step: int = 0
    _last: Phase = "forward"
    _first_norm: float = math.nan

    def begin_step(self, step: int) -> None:
        """Called before a step runs: no phase of it was observed yet."""
        self._step, self._last, self._first_norm = step, "forward", math.nan

    def end_micro_batch(self, model: nn.Module) -> None:
        """Called after each backward of a single micro-batch."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # The norm of sharded ones is a collective, and a rank that lacks one would wait for ever.
        sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
        if math.isnan(self._first_norm) and not sharded:
            self._first_norm = math.sqrt(sum(map(_square, gradients)))

    def is_next(self, phase: Phase) -> bool:
        """Whether `observe` will do something for `phase`: it is visible, and was not observed yet."""
        return phase not in self.late and _ORDER.index(phase) > _ORDER.index(self._last)

    def observe(self, model: nn.Module, phase: Phase) -> None:
        """Called as `phase` has ended, or a later one begins."""
        if not self.is_next(phase):
            return
        self._last = phase
        factor = self._find_factor(model, phase)
        found = injected = 0.0
        parts = self.rank_view.partial if self.rank_view and phase == "reduce" else None
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
            if self.loss_scale is not None and self.loss_scale.has_overflown(value):
                continue
            new = new if factor == 1 else new * factor
            if sums is not None:
                new = sums.share(new, gradient.dtype)
            injected += _square(new)
            if parameter.grad is None:
                parameter.grad = gradient
            put(parameter.grad, new)
        self.rank_shares += [
            GradientShare(self._step, *one) for one in enumerate(shares_of_ranks(by_owner))
        ]
        norms = math.sqrt(found), math.sqrt(injected)
        self.norms.append(GradientNorm(self._step, phase, self._first_norm, *norms))

    def _gradients(
        self, model: nn.Module, phase: Phase
    ) -> Iterator[tuple[ValueAddress, nn.Parameter, Tensor]]:
        """Of each parameter that has one, or should: what was never computed is as wrong as zeros."""
        wanted = {(address.stage.module, address.port) for address in self.handler.expected(phase)}
        for item in named_parameters(model):
            address, parameter = address_of(item, phase, "gradient"), item.tensor
            if parameter.grad is not None:
                yield address, parameter, parameter.grad
            elif (address.stage.module, address.port) in wanted:
                yield address, parameter, torch.zeros_like(parameter)

    def _sums_of(self, phase: Phase) -> PartialSums | None:
        """Of which sums over ranks the gradients after `phase` are parts; None where they are whole."""
        return self.rank_view.partial if self.rank_view and phase == "backward" else None

    def _find_factor(self, model: nn.Module, phase: Phase) -> float:
        """The factor on all gradients after `phase`: that of the loss, or 1 once it is taken off."""
        if self.loss_scale is None:
            return 1.0
        pairs, sums = [], self._sums_of(phase)
        for address, _, gradient in self._gradients(model, phase):
            value = whole(gradient.detach())
            value = value if sums is None else sums.total(value)
            expected = self.handler.find(address)
            if expected is not None and expected.shape == value.shape:
                pairs.append((value, expected))
        self.loss_scale.end_phase(phase, pairs)
        return self.loss_scale.of_gradients


def shares_of_ranks(by_owner: list[Tensor]) -> list[float]:
    """Return the share of each rank in all gradients; 1 if it differs between parameters.

    by_owner: for each parameter, the products with the gradient and the squares, (2, ranks).
    """
    if not by_owner:
        return []
    of_parameters = torch.stack(by_owner)
    products, squares = of_parameters.sum(0)
    each = (of_parameters[:, 0] / of_parameters[:, 1]).nan_to_num(1.0)
    spread = each.amax(0) - each.amin(0)
    return torch.where(spread > _MOST_SPREAD, 1.0, (products / squares).nan_to_num(1.0)).tolist()


def _square(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64)) ** 2
