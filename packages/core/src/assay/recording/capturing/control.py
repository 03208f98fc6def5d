"""Turning a capture on and off while the script runs."""

import json
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from assay.errors import UsageError
from assay.recording.capturing.capture_filter import Ranges

SIGNAL = "SIGUSR1"
_MAX_BYTES = 10_000


@dataclass
class Switch:
    """State of a control, which holds from the next pass on."""

    is_on: bool = True
    tokens: Ranges | None = None
    """None for the ranges of the capture."""


@dataclass
class Control:
    """Controls a running capture. This base class never changes it."""

    switch: Switch = field(default_factory=Switch, init=False)

    def poll(self) -> str | None:
        """Update `switch` before a pass. Returns: an error in the user's request."""
        return None

    def close(self) -> None:
        """Release the source of requests."""


@dataclass
class FileControl(Control):
    """A JSON file, read again when it changes: {"capture": false, "tokens": "0:16"}.

    Without a file, the capture is on.
    """

    path: Path
    _known: tuple[int, int] | None = None

    def poll(self) -> str | None:
        """Read the file if it changed. An invalid file changes nothing, and is returned as an error."""
        try:
            found = self.path.stat()
            stamp = found.st_mtime_ns, found.st_size
            if stamp == self._known:
                return None
            self._known = stamp
            with self.path.open(encoding="utf-8") as file:
                self.switch = _parse_switch(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, UsageError) as error:
            return f"{self.path}: ignored, since {error}"
        return None


@dataclass
class SignalControl(Control):
    """SIGUSR1, which turns the capture off or on, then calls the previous handler."""

    _earlier: object = None

    def __post_init__(self) -> None:
        """Install the handler. Raises: UsageError outside of the main thread, as Python requires it."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(f"control={SIGNAL!r} needs a capture that the main thread starts")
        self._earlier = signal.signal(signal.SIGUSR1, self._toggle)

    def _toggle(self, number: int, frame: FrameType | None) -> None:
        self.switch = Switch(not self.switch.is_on, self.switch.tokens)
        if callable(self._earlier):
            self._earlier(number, frame)

    def close(self) -> None:
        """Restore the previous handler, unless another one was installed since."""
        if signal.getsignal(signal.SIGUSR1) == self._toggle:
            signal.signal(signal.SIGUSR1, self._earlier or signal.SIG_DFL)  # type: ignore[arg-type]


def open_control(text: str | None) -> Control:
    """Return the control that a user named: SIGUSR1 or the path of a file.

    Raises: UsageError for another signal, or if no handler can be installed.
    """
    if text is None:
        return Control()
    if text != SIGNAL and hasattr(signal, text):
        raise UsageError(f"control={text!r}: name {SIGNAL} or a file")
    return SignalControl() if text == SIGNAL else FileControl(Path(text))


def _parse_switch(text: str) -> Switch:
    try:
        wanted = json.loads(text)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict) or not wanted.keys() <= {"capture", "tokens"}:
        raise UsageError('it is not like {"capture": true, "tokens": "0:16"}')
    is_on, tokens = wanted.get("capture", True), wanted.get("tokens")
    if not isinstance(is_on, bool) or not isinstance(tokens, str | None):
        raise UsageError('"capture" is true or false, and "tokens" a text such as "0:16"')
    return Switch(is_on, Ranges.parse(tokens) if tokens else None)
