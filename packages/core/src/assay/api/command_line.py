"""Helpers of the API functions: their command line, and the run of a check."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict
    from assay.runs import Progress


def command_line(
    function: Callable[..., object],
    arguments: Mapping[str, Any],
    positional: Sequence[str] = ("model",),
) -> tuple[str, ...]:
    """Return the command line that repeats a call of `function`, without default arguments.

    positional: names of the positional arguments.
    Omits `output`, as a folder is written only once.
    """
    parameters = inspect.signature(function).parameters
    words = ["assay", *function.__name__.split("_"), *(str(arguments[name]) for name in positional)]
    for name, value in arguments.items():
        if name in (*positional, "output") or value == parameters[name].default:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            words += [word for pair in value.items() for word in (option, "=".join(pair))]
        elif isinstance(value, (list, tuple)):
            words += [word for item in value for word in (option, item)]
        else:
            words += [option] if value is True else [option, str(value)]
    return tuple(words)


def run_and_publish(run: "Callable[[Path, Progress], object]", folder: Path) -> "CheckedVerdict":
    """Show the progress of `run`, which writes a verdict into `folder`, and write its report."""
    from assay.runs import open_progress

    with open_progress() as progress:
        run(folder, progress)
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return CheckedVerdict.publish(folder)
