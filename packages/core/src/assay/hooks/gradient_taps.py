"""Gradients at module boundaries, observed and replaced in backward.

At every boundary a *gradient tap* keeps the injected value in the graph. In backward the tap
observes the gradient that arrives and may return another. So an error of backward stays in the
stage that makes it, as in forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from assay.hooks.module_tracer import ActiveCall, TraceHandler
from assay.hooks.suspension import suspended
from assay.hooks.tensors import InPlaceChanges, copy_of, iterate_tensors, replace_tensors
from assay.sites import Call, CallSite


class BoundaryHandler(TraceHandler, Protocol):
    """Records or compares the values at module boundaries and their gradients, and replaces them."""

    def recognizes(self, value: Tensor) -> bool:
        """Return True if this object was injected."""

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Treat `new` as the injected value `known` from now on."""

    def in_order(self, active: ActiveCall, made: Tensor) -> Tensor:
        """Return a computed value with its columns in the order of the value injected for it."""
        ...

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Return True, in forward, if `arrive` wants the gradient of `value`."""

    def begin_backward(self, gradient: Tensor) -> None:
        """Get the gradient of the loss, before all others."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Return the gradient that backward continues with."""

    def finish_backward(self, missing: list[tuple[CallSite, str]]) -> None:
        """End a backward pass; `missing` are the expected gradients that did not arrive, in order."""


class _GradientTap(torch.autograd.Function):
    """Replaces a computed value in the graph by an injected one."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        computed: Tensor,
        injected: Tensor,
        anchor: Tensor,
        arrive: Callable[[Tensor], Tensor],
    ) -> Tensor:
        del computed, anchor
        ctx.arrive = arrive
        # A copy: autograd forbids changes in place of a view that a Function returns.
        with suspended():
            return copy_of(injected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        with suspended():
            return ctx.arrive(gradient), None, None, None


class _Join(torch.autograd.Function):
    """Makes the loss depend on every tap: one that backward would not reach gets zeros."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        loss: Tensor,
        begin: Callable[[Tensor], None],
        *tapped: Tensor,
    ) -> Tensor:
        ctx.begin, ctx.num_tapped = begin, len(tapped)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        with suspended():
            ctx.begin(gradient)
        return gradient, None, *[None] * ctx.num_tapped


@dataclass
class GradientTaps:
    """A handler that puts a tap at every boundary where `inner` injects a value.

    Boundaries of the same value have separate taps: along a residual stream gradients differ.
    """

    inner: BoundaryHandler
    # Values that the candidate detached get gradients too, which are compared.
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _tapped: list[Tensor] = field(default_factory=list)
    _places: set[tuple[CallSite, str]] = field(default_factory=set)
    _waiting: set[tuple[CallSite, str]] = field(default_factory=set)
    # For each running call, the changes to its copies of the caller's tensors.
    _copies: dict[CallSite, tuple[dict[str, Tensor], InPlaceChanges]] = field(default_factory=dict)

    def enter(self, active: ActiveCall) -> None:
        """Let `inner` handle the call, then put taps at the arguments."""
        if active.call.caller is None and not active.is_recompute:
            self._places.clear()
            self._copies.clear()
        computed = dict(iterate_tensors(active.arguments, "input"))
        self.inner.enter(active)
        if active.state is None:
            return
        active.arguments = replace_tensors(
            active.arguments,
            "input",
            lambda port, tensor: self._tap(active, port, computed, tensor),
        )
        self._copies[active.call.site] = computed, InPlaceChanges(active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Let `inner` handle the results, then put taps at them."""
        computed = dict(iterate_tensors(output, "output"))
        output = self.inner.leave(active, output)
        if active.state is None:
            return output
        self._change_callers_tensors(active)
        tap = self._pass_through if _holds_own_loss(active, computed) else self._tap
        return replace_tensors(
            output, "output", lambda port, tensor: tap(active, port, computed, tensor)
        )

    def finish_root(self, active: ActiveCall) -> None:
        """Let `inner` end the root call."""
        self.inner.finish_root(active)

    def join(self, loss: Tensor) -> Tensor:
        """Return the loss, with a backward that reaches every tap since the previous `join`."""
        tapped, self._tapped = self._tapped, []
        return cast("Tensor", _Join.apply(loss, self.inner.begin_backward, *tapped))  # type: ignore[no-untyped-call]

    def finish_backward(self) -> None:
        """End a backward pass."""
        missing = sorted(self._waiting)
        self._waiting.clear()
        self.inner.finish_backward(missing)

    def _change_callers_tensors(self, active: ActiveCall) -> None:
        """Apply the call's changes to its copies to the caller's tensors."""
        computed, changes = self._copies.pop(active.call.site)
        for port, copy in changes.changed():
            original = computed[f"input.{port}"]
            if original is not copy:
                original.copy_(copy)

    def _tap(
        self, active: ActiveCall, port: str, computed: dict[str, Tensor], injected: Tensor
    ) -> Tensor:
        value = computed.get(port)
        if (
            value is None
            or not torch.is_grad_enabled()
            or not injected.is_floating_point()
            or not self.inner.recognizes(injected)
        ):
            return injected
        value = self.inner.in_order(active, value)
        if self.inner.expects(active.call, port, value):
            arrive = self._arrive_at(active, port)
        elif value.requires_grad:
            arrive = _pass_unchanged  # an unexpected gradient is not compared, and not cut off
        else:
            return injected
        tapped = self._insert_tap(value, injected, arrive)
        if not active.is_recompute:
            self._tapped.append(tapped)
        return tapped

    def _pass_through(
        self, active: ActiveCall, port: str, computed: dict[str, Tensor], injected: Tensor
    ) -> Tensor:
        """Insert a tap that passes gradients on and that only a loss of this value reaches."""
        del active
        value = computed.get(port)
        if value is None or not value.requires_grad or not self.inner.recognizes(injected):
            return injected
        return self._insert_tap(value, injected, _pass_unchanged)

    def _insert_tap(
        self, value: Tensor, injected: Tensor, arrive: Callable[[Tensor], Tensor]
    ) -> Tensor:
        tapped: Tensor = _GradientTap.apply(value, injected.detach(), self._anchor, arrive)  # type: ignore[no-untyped-call]
        self.inner.alias(tapped, injected)
        return tapped

    def _arrive_at(self, active: ActiveCall, port: str) -> Callable[[Tensor], Tensor]:
        """Return the function that gets the gradient at a boundary.

        For recomputed activations backward needs only the values, unless they had no graph before.
        """
        call = active.call
        place = call.site, port
        if active.is_recompute and place in self._places:
            return _pass_unchanged
        self._places.add(place)
        self._waiting.add(place)

        def arrive(gradient: Tensor) -> Tensor:
            self._waiting.discard(place)
            return self.inner.arrive(call, port, gradient)

        return arrive


def _holds_own_loss(active: ActiveCall, computed: dict[str, Tensor]) -> bool:
    """Return True if the model computed a loss: gradients then come through the head's results."""
    loss = computed.get("output.loss")
    return active.call.caller is None and loss is not None and loss.requires_grad


def _pass_unchanged(gradient: Tensor) -> Tensor:
    return gradient
