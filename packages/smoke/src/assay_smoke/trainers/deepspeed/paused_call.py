"""A call that stops half-way, so that its caller can look at what it has done so far."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread


class PausedCall:
    """Runs `call` in a thread of its own, up to where it calls `pause` and from there to its end.

    DeepSpeed clips and changes the parameters in one call: between the two a check compares the
    gradients. Nothing runs at the same time: who started the call waits while it runs.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._stopped: SimpleQueue[str] = SimpleQueue()
        self._go_on = Event()
        self._error: BaseException | None = None
        # A caller that raises leaves it behind: it must not keep the process alive.
        self._thread = Thread(target=self._run, name="paused call", daemon=True)

    def start(self) -> bool:
        """Run up to the pause. Returns: whether there is one; else the call has ended."""
        self._thread.start()
        return self._wait() == "paused"

    def pause(self) -> None:
        """Called by `call`: wait here until `finish`."""
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
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            self._error = error
        self._stopped.put("ended")
