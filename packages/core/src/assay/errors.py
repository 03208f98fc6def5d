"""Base classes of all errors, and wording for messages.

A numerical mismatch is a `assay.verdicts.Verdict`, never an exception.
"""

import re
import shlex
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

_NAMES_SHOWN = 3
_PATTERNS_SHOWN = 4


class AssayError(Exception):
    """An error that stops a command before a verdict. The command line exits with 2."""

    exit_code = 2


class UsageError(AssayError):
    """An error of the caller: a wrong option, file or model."""


class MachineError(AssayError):
    """An error of the machine: an absent device, a full disk, a killed process."""


def name_some(names: Sequence[str], num_shown: int = _NAMES_SHOWN) -> str:
    """List the first `num_shown` of `names`, and count the others."""
    rest = len(names) - num_shown
    shown = ", ".join(names[:num_shown])
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def name_alike(names: Iterable[str]) -> str:
    """Merge names that differ only in numbers, such as layer indices.

    >>> name_alike(["h.0.w", "h.1.w", "norm.w"])
    'h.*.w (2), norm.w'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    patterns = [
        alike[0] if len(alike) == 1 else f"{pattern} ({len(alike)})"
        for pattern, alike in groups.items()
    ]
    return name_some(patterns, _PATTERNS_SHOWN)


def suggest(what: str, name: str, known: Iterable[str]) -> str:
    """Describe an unknown name, with the nearest known one or all of them."""
    names = list(known)
    rest = did_you_mean(name, names) or f"known: {', '.join(names)}"
    return f"unknown {what} {name!r}; {rest}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask for the nearest known name; "" without a near one."""
    nearest = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {nearest[0]}?" if nearest else ""


def assay_command(*words: object, **options: object) -> str:
    """Return a command of assay for a message, quoted for a shell. Options of None or False are left out.

    >>> assay_command("capture", "my model", noise_for="bfloat16", chat=True, seed=None)
    "assay capture 'my model' --noise-for bfloat16 --chat"
    """
    line = ["assay", *map(str, words)]
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            line += [option] if value is True else [option, str(value)]
    return shlex.join(line)


def raised_in_words(error: BaseException) -> str:
    """Describe an exception, with its innermost line outside installed packages, or else in transformers."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    others = (*installed, str(Path(__file__).parent), "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    shown = own or [frame for frame in frames if "transformers" in Path(frame.filename).parts]
    if not shown:
        return text
    return (
        f"{text}\n  {shown[-1].filename}:{shown[-1].lineno}, in {shown[-1].name}: {shown[-1].line}"
    )


def exit_in_words(code: int) -> str:
    """Describe the end of a process by its exit code, as in "was ended by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
