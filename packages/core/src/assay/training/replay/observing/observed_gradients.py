"""Observes the gradients of all parameters after each phase of a step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.locating.gradients import LossScale
from assay.sites import Phase
from assay.training.protocol import PHASE_METHODS
from assay.training.replay.observing.findings import (
    GradientFindings,
    GradientNorm,
    GradientShare,
)
from assay.training.replay.rank_scope import RankScope
from assay.training.replay.stage_values import NORM, StepValueHandler, ValueAddress, address_of
from assay.training.state.parameters import in_blocks, named_parameters
from assay.training.state.sharding import PartialSums, put, whole

_ORDER = list(PHASE_METHODS)

# The share of a rank is the same in all parameters only if its whole part is missing or weighted.
_MOST_SPREAD = 0.5


@dataclass
class ObservedGradients:
    """Passes the gradients after each phase to a handler, once per step, and injects its answer."""

    handler: StepValueHandler
    scope: RankScope | None
    loss_scale: LossScale | None
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

        norm: the reference's before clipping.
        """
        if norm is None:
            return "backward"
        addresses = self.handler.expected("clip")
        values = [self.handler.find(one) for one in addresses if one.port != NORM]
        clipped = math.sqrt(sum(_square(value) for value in values if value is not None))
        factor = 1.0 if self.loss_scale is None else self.loss_scale.of_gradients
        found = math.sqrt(sum(_square(value) for *_, value in self._gradients(model, "clip")))
        before = [float(norm), float(norm) * factor]
        if not (found and clipped):
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
        parts = self.scope.partial if self.scope and phase == "reduce" else None
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
        return self.scope.partial if self.scope and phase == "backward" else None

    def _find_factor(self, model: nn.Module, phase: Phase) -> float:
        """Return the factor of all gradients after `phase`, 1 once the loss scale is removed."""
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
