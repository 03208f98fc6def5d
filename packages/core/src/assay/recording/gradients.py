"""Gradients as they cross module borders on their way back.

At every border the value that is handed on forwards stays in the graph by a *crossing*. In
backward the crossing meets the gradient that arrives, and hands on another one if it is told to:
so an error made in backward stays in the stage that makes it, as an error in forward does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from assay.recording.hooks import Entry, Listener
from assay.recording.modes import suspended
from assay.recording.nested import iterate_tensors, map_tensors
from assay.recording.rounding import Border
from assay.sites import Call, CallSite
from assay.trace import TraceWriter


class BorderListener(Listener, Protocol):
    """A listener that knows values again which it handed on."""

    def recognises(self, value: Tensor) -> bool:
        """Whether this very object was handed on."""

    def alias(self, new: Tensor, known: Tensor) -> None:
        """From now on `new` is what `known` is."""


class GradientKeeper(Protocol):
    """What is done with the gradients that arrive at borders."""

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Whether a gradient shall be met at `port` of `call`, where `value` was made."""

    def announce(self, call: Call, port: str) -> None:
        """A gradient is to arrive there."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Take a gradient; returns the one that is handed on."""

    def finish_backward(self) -> None:
        """All gradients of one backward pass have arrived."""


class _Crossing(torch.autograd.Function):
    """Hands on a value that was made elsewhere as if it were the one that the graph made."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        made: Tensor,
        handed_on: Tensor,
        anchor: Tensor,
        arrive: Callable[[Tensor], Tensor],
    ) -> Tensor:
        del made, anchor
        ctx.arrive = arrive
        # A tensor of its own: code may change it in place, and views of a Function's may not be.
        return handed_on.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        with suspended():
            return ctx.arrive(gradient), None, None, None


class _Join(torch.autograd.Function):
    """The loss, on which every crossing depends: one that nothing else reaches gets zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *crossed: Tensor) -> Tensor:  # noqa: ANN401
        ctx.num_crossed = len(crossed)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        return gradient, *[None] * ctx.num_crossed


@dataclass
class GradientWatch:
    """A listener that puts a crossing at every border where `inner` hands on a value.

    A border has its own crossing even if its value is known already: along a residual stream the
    values are the same and the gradients are not.
    """

    inner: BorderListener
    keeper: GradientKeeper
    # A value that the candidate detached has to get gradients too: they are compared.
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _crossed: list[Tensor] = field(default_factory=list)
    _places: set[tuple[CallSite, str]] = field(default_factory=set)

    def enter(self, entry: Entry) -> None:
        """As `inner` does, with crossings at the arguments."""
        if entry.call.caller is None and not entry.again:
            self._places.clear()
        made = _tensors_of(entry.arguments)
        self.inner.enter(entry)
        if entry.state is None:
            return
        for name, value in entry.arguments.items():
            entry.arguments[name] = map_tensors(
                value, f"input.{name}", lambda port, tensor: self._cross(entry, port, made, tensor)
            )

    def leave(self, entry: Entry, output: Any) -> Any:  # noqa: ANN401 - see Listener
        """As `inner` does, with crossings at the results."""
        made = dict(iterate_tensors(output, "output"))
        output = self.inner.leave(entry, output)
        if entry.state is None:
            return output
        cross = self._pass_through if _holds_own_loss(entry, made) else self._cross
        return map_tensors(output, "output", lambda port, tensor: cross(entry, port, made, tensor))

    def finish_root(self, entry: Entry) -> None:
        """As `inner` does."""
        self.inner.finish_root(entry)

    def join(self, loss: Tensor) -> Tensor:
        """`loss`, such that its backward reaches every crossing made since the last one."""
        crossed, self._crossed = self._crossed, []
        return cast("Tensor", _Join.apply(loss, *crossed))  # type: ignore[no-untyped-call]

    def _cross(self, entry: Entry, port: str, made: dict[str, Tensor], handed_on: Tensor) -> Tensor:
        value = made.get(port)
        if (
            value is None
            or not torch.is_grad_enabled()
            or not handed_on.is_floating_point()
            or not self.inner.recognises(handed_on)
        ):
            return handed_on
        if self.keeper.expects(entry.call, port, value):
            arrive = self._arrive_at(entry, port)
        elif value.requires_grad:
            arrive = _as_it_is  # more than is expected is not compared, and not cut off either
        else:
            return handed_on
        crossed = cast(
            "Tensor",
            _Crossing.apply(value, handed_on.detach(), self._anchor, arrive),  # type: ignore[no-untyped-call]
        )
        self.inner.alias(crossed, handed_on)
        if not entry.again:
            self._crossed.append(crossed)
        return crossed

    def _pass_through(
        self, entry: Entry, port: str, made: dict[str, Tensor], handed_on: Tensor
    ) -> Tensor:
        """A crossing that only a loss from this value reaches: gradients go on as they are."""
        del entry
        value = made.get(port)
        if value is None or not value.requires_grad or not self.inner.recognises(handed_on):
            return handed_on
        crossed: Tensor = _Crossing.apply(value, handed_on.detach(), self._anchor, _as_it_is)  # type: ignore[no-untyped-call]
        self.inner.alias(crossed, handed_on)
        return crossed

    def _arrive_at(self, entry: Entry, port: str) -> Callable[[Tensor], Tensor]:
        """What is done with the gradient at a border.

        Of activations that are computed again backward needs the values alone, unless they had
        no graph the first time.
        """
        call, keeper = entry.call, self.keeper
        place = call.site, port
        if entry.again and place in self._places:
            return _as_it_is
        self._places.add(place)
        keeper.announce(call, port)
        return lambda gradient: keeper.arrive(call, port, gradient)


@dataclass
class GradientRecorder:
    """Writes the gradients at all borders, as calls of the phase `backward`."""

    writer: TraceWriter
    border: Border
    _arrived: dict[CallSite, tuple[Call, dict[str, Tensor]]] = field(default_factory=dict)

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Wherever there is one."""
        del call, port
        return value.requires_grad

    def announce(self, call: Call, port: str) -> None:
        """Nothing: what arrives is written."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Keep the gradient, and hand on what the border makes of it."""
        stored = self.border.store(gradient.detach())
        self._arrived.setdefault(call.site, (call, {}))[1][port] = stored
        return self.border.hand_on(stored, gradient.dtype)

    def finish_backward(self) -> None:
        """Write what arrived."""
        for call, gradients in self._arrived.values():
            backward = replace(call, site=call.site.backward, ports=tuple(gradients))
            self.writer.add(backward, gradients)
        self._arrived.clear()
        self.writer.flush()


def _holds_own_loss(entry: Entry, made: dict[str, Tensor]) -> bool:
    """Whether the model computed a loss itself: gradients need not come through its results.

    They are met at the head's.
    """
    loss = made.get("output.loss")
    return entry.call.caller is None and loss is not None and loss.requires_grad


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {
        port: tensor
        for name, value in arguments.items()
        for port, tensor in iterate_tensors(value, f"input.{name}")
    }
