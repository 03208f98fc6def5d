"""A call that pauses midway so that its caller can inspect its progress."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread


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
