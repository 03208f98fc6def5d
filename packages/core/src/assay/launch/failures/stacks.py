"""Find the line that a rank executes, in the stack that faulthandler wrote."""

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")

# How the files of libraries and of this package begin.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    "<frozen",
)
# Functions that only call the function that the body means.
_WRAPPERS = {"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn"}
# Modes around the body stand above the function that it called.
_MODES = {"__torch_function__", "__torch_dispatch__"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def read_stack(text: str) -> list[Frame]:
    """Return the last stack of the main thread, the innermost frame first.

    text: a rank's stack file, whose first line is the main thread's identity.
    """
    identity, _, dumps = text.partition("\n")
    frames: list[Frame] = []
    is_main = False
    for line in dumps.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread["ident"], 16) == int(identity, 16)
            if is_main:
                frames = []
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(Frame(**frame.groupdict()))
    return frames


def describe_place(frames: list[Frame]) -> str:
    """Return the innermost line outside libraries, and the library function that it called.

    frames: the innermost first. Returns: "" for no frames.
    """
    if not frames:
        return ""
    bodies = (frame for frame in frames if frame.function not in _MODES)
    own = next((frame for frame in bodies if not frame.file.startswith(_LIBRARIES)), None)
    if own is None:
        return str(frames[0])
    inside = [frame for frame in frames[: frames.index(own)] if frame.function not in _WRAPPERS]
    # The function that the body called is more useful than the innermost one.
    return f"{own}, in {inside[-1].function}" if inside else str(own)
