"""Turning a capture on and off while the script runs."""

import json
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from assay.errors import UsageError
from assay.recording.selection import Ranges

SIGNAL = "SIGUSR1"
_MAX_BYTES = 10_000


@dataclass
class Switch:
    """State of the control, for the passes to come. tokens: None for the ranges of the capture."""

    is_on: bool = True
    tokens: Ranges | None = None


class Control(Protocol):
    """A way to change a running capture."""

    switch: Switch

    def poll(self) -> str | None:
        """Bring `switch` up to date before a pass. Returns: what is wrong with the user's wish."""

    def close(self) -> None:
        """Listen no longer."""


@dataclass
class NoControl:
    """A capture that nobody changes."""

    switch: Switch = field(default_factory=Switch)

    def poll(self) -> str | None:
        """Change nothing."""
        return None

    def close(self) -> None:
        """Do nothing."""


@dataclass
class FileControl:
    """A file of JSON, read again when it changes: {"capture": false, "tokens": "0:16"}.

    Without a file, the capture is on.
    """

    path: Path
    switch: Switch = field(default_factory=Switch)
    _known: tuple[int, int] | None = None

    def poll(self) -> str | None:
        """Read the file if it changed. Nonsense changes nothing, and is returned as a message."""
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

    def close(self) -> None:
        """Do nothing."""


@dataclass
class SignalControl:
    """SIGUSR1 turns the capture off, the next one on. An earlier handler is called as well."""

    switch: Switch = field(default_factory=Switch)
    _earlier: object = None

    def __post_init__(self) -> None:
        """Listen. Raises: UsageError outside of the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(f"control={SIGNAL!r} needs a capture that the main thread starts")
        self._earlier = signal.signal(signal.SIGUSR1, self._toggle)

    def _toggle(self, number: int, frame: FrameType | None) -> None:
        self.switch = Switch(not self.switch.is_on, self.switch.tokens)
        if callable(self._earlier):
            self._earlier(number, frame)

    def poll(self) -> str | None:
        """Change nothing: signals come by themselves."""
        return None

    def close(self) -> None:
        """Give the signal back, unless somebody else has it by now."""
        if signal.getsignal(signal.SIGUSR1) == self._toggle:
            signal.signal(signal.SIGUSR1, self._earlier or signal.SIG_DFL)  # type: ignore[arg-type]


def open_control(text: str | None) -> Control:
    """Return the control that a user named: SIGUSR1 or the path of a file.

    Raises: UsageError for another signal, or if no handler can be installed.
    """
    if text is None:
        return NoControl()
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
