"""Gradients at module boundaries, observed and replaced on their way back.

At every boundary the injected value stays in the graph by a *gradient tap*. In backward the tap
observes the gradient that arrives and may pass another one on: so an error made in backward stays
in the stage that makes it, as an error in forward does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from assay.hooks.in_place_changes import InPlaceChanges
from assay.hooks.module_tracer import ActiveCall, TraceHandler
from assay.hooks.suspension import suspended
from assay.hooks.values.memory_layout import copy_of
from assay.hooks.values.nested import iterate_tensors, map_tensors
from assay.sites import Call, CallSite


class BoundaryHandler(TraceHandler, Protocol):
    """A handler that recognises the values that it injected."""

    def recognises(self, value: Tensor) -> bool:
        """Whether this very object was injected."""

    def alias(self, new: Tensor, known: Tensor) -> None:
        """From now on treat `new` as the injected value `known`."""

    def in_order(self, active: ActiveCall, made: Tensor) -> Tensor:
        """What a call made, with its columns in the order of what was injected in its place."""
        ...


class GradientHandler(Protocol):
    """What is done with the gradients that arrive at boundaries."""

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Called in forward: whether a gradient of `value`, at `port` of `call`, is wanted."""

    def announce(self, call: Call, port: str) -> None:
        """Called in forward for each gradient that `arrive` is to get."""

    def begin_backward(self, gradient: Tensor) -> None:
        """Called in backward, before all others, with the gradient of the loss itself."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Called in backward with a gradient; returns the one that goes on from there."""

    def finish_backward(self) -> None:
        """Called when a backward pass has ended."""


class _GradientTap(torch.autograd.Function):
    """Puts an injected value into the graph, in place of the one that was made there."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        made: Tensor,
        injected: Tensor,
        anchor: Tensor,
        arrive: Callable[[Tensor], Tensor],
    ) -> Tensor:
        del made, anchor
        ctx.arrive = arrive
        # A tensor of its own: code may change it in place, and views of a Function's may not be.
        return copy_of(injected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        with suspended():
            return ctx.arrive(gradient), None, None, None


class _Join(torch.autograd.Function):
    """The loss, on which every tap depends: one that nothing else reaches gets zeros."""

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

    A boundary has its own tap even if its value is known already: along a residual stream the
    values are the same and the gradients are not.
    """

    inner: BoundaryHandler
    handler: GradientHandler
    # A value that the candidate detached has to get gradients too: they are compared.
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _tapped: list[Tensor] = field(default_factory=list)
    _places: set[tuple[CallSite, str]] = field(default_factory=set)
    # For each running call, the changes to its copies of the caller's tensors.
    _copies: dict[CallSite, tuple[dict[str, Tensor], InPlaceChanges]] = field(default_factory=dict)

    def enter(self, active: ActiveCall) -> None:
        """As `inner` does, with taps at the arguments."""
        if active.call.caller is None and not active.is_recompute:
            self._places.clear()
            self._copies.clear()
        made = _tensors_of(active.arguments)
        self.inner.enter(active)
        if active.state is None:
            return
        for name, value in active.arguments.items():
            active.arguments[name] = map_tensors(
                value, f"input.{name}", lambda port, tensor: self._tap(active, port, made, tensor)
            )
        self._copies[active.call.site] = made, InPlaceChanges(active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """As `inner` does, with taps at the results."""
        made = dict(iterate_tensors(output, "output"))
        output = self.inner.leave(active, output)
        if active.state is None:
            return output
        self._change_callers_tensors(active)
        tap = self._pass_through if _holds_own_loss(active, made) else self._tap
        return map_tensors(output, "output", lambda port, tensor: tap(active, port, made, tensor))

    def finish_root(self, active: ActiveCall) -> None:
        """As `inner` does."""
        self.inner.finish_root(active)

    def join(self, loss: Tensor) -> Tensor:
        """`loss`, such that its backward reaches every tap made since the last one."""
        tapped, self._tapped = self._tapped, []
        return cast("Tensor", _Join.apply(loss, self.handler.begin_backward, *tapped))  # type: ignore[no-untyped-call]

    def _change_callers_tensors(self, active: ActiveCall) -> None:
        """Apply the call's changes to its copies to the caller's tensors."""
        made, changes = self._copies.pop(active.call.site)
        for port, copy in changes.changed():
            original = made[f"input.{port}"]
            if original is not copy:
                original.copy_(copy)

    def _tap(
        self, active: ActiveCall, port: str, made: dict[str, Tensor], injected: Tensor
    ) -> Tensor:
        value = made.get(port)
        if (
            value is None
            or not torch.is_grad_enabled()
            or not injected.is_floating_point()
            or not self.inner.recognises(injected)
        ):
            return injected
        value = self.inner.in_order(active, value)
        if self.handler.expects(active.call, port, value):
            arrive = self._arrive_at(active, port)
        elif value.requires_grad:
            arrive = (
                _pass_unchanged  # more than is expected is not compared, and not cut off either
            )
        else:
            return injected
        tapped = cast(
            "Tensor",
            _GradientTap.apply(value, injected.detach(), self._anchor, arrive),  # type: ignore[no-untyped-call]
        )
        self.inner.alias(tapped, injected)
        if not active.is_recompute:
            self._tapped.append(tapped)
        return tapped

    def _pass_through(
        self, active: ActiveCall, port: str, made: dict[str, Tensor], injected: Tensor
    ) -> Tensor:
        """A tap that only a loss from this value reaches: gradients go on as they are."""
        del active
        value = made.get(port)
        if value is None or not value.requires_grad or not self.inner.recognises(injected):
            return injected
        tapped: Tensor = _GradientTap.apply(value, injected.detach(), self._anchor, _pass_unchanged)  # type: ignore[no-untyped-call]
        self.inner.alias(tapped, injected)
        return tapped

    def _arrive_at(self, active: ActiveCall, port: str) -> Callable[[Tensor], Tensor]:
        """What is done with the gradient at a boundary.

        Of activations that are computed again backward needs the values alone, unless they had
        no graph the first time.
        """
        call, handler = active.call, self.handler
        place = call.site, port
        if active.is_recompute and place in self._places:
            return _pass_unchanged
        self._places.add(place)
        handler.announce(call, port)
        return lambda gradient: handler.arrive(call, port, gradient)


def _holds_own_loss(active: ActiveCall, made: dict[str, Tensor]) -> bool:
    """Whether the model computed a loss itself: gradients need not come through its results.

    They come through the head's.
    """
    loss = made.get("output.loss")
    return active.call.caller is None and loss is not None and loss.requires_grad


def _pass_unchanged(gradient: Tensor) -> Tensor:
    return gradient


def _tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {
        port: tensor
        for name, value in arguments.items()
        for port, tensor in iterate_tensors(value, f"input.{name}")
    }
