"""Makes a step of DeepSpeed visible: pauses it before its update, and shows whole gradients in `.grad`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread

import torch
from torch import Tensor, nn


class PausedCall:
    """Runs `call` in a thread, up to its call of `pause` and from there to its end.

    DeepSpeed clips and updates in one call, and a check compares the gradients between both. The caller
    waits while the thread runs, so nothing runs concurrently.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._stopped: SimpleQueue[str] = SimpleQueue()
        self._go_on = Event()
        self._error: BaseException | None = None
        # A daemon: if the caller raises, the waiting thread must not keep the process alive.
        self._thread = Thread(target=self._run, name="paused call", daemon=True)

    def start(self) -> bool:
        """Run up to the pause. Return False if the call ended without one."""
        self._thread.start()
        return self._wait() == "paused"

    def pause(self) -> None:
        """Wait until `finish`. For use by `call`."""
        self._stopped.put("paused")
        self._go_on.wait()

    def finish(self) -> None:
        """Run from the pause to the end."""
        self._go_on.set()
        self._wait()

    def _wait(self) -> str:
        where = self._stopped.get()
        if where == "ended":
            self._thread.join()
            if self._error is not None:
                raise self._error
        return where

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        self._stopped.put("ended")


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
