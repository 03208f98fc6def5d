"""Options of the API functions, from which the command line is derived, and the run of a check.

Parameters without an `Option` in their annotation exist in Python only.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from assay.sites import KeptFiles

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict
    from assay.runs import Progress


# Under CI a check that hangs must end before its job does, which shows no stack.
_CI_SECONDS = 7200.0


@dataclass(frozen=True, slots=True)
class Option:
    """The command line's description of a parameter."""

    help: str
    metavar: str | None = None
    minimum: float | None = None
    variable: str | None = None
    """Environment variable that holds the default."""


Model = Annotated[str, Option("Folder, hub name, or micro:RECIPE.", "MODEL")]
Reference = Option("The trusted device: cpu/float32.", "RUN")
Candidate = Annotated[str, Option("What is judged, as DEVICE/DTYPE: sim/bfloat16.", "RUN")]
Prompts = Annotated[
    str | Path | None,
    Option(
        'One prompt a line: {"prompt": TEXT}, {"ids": [...]} or {"messages": [...]}.', "FILE.jsonl"
    ),
]
PromptLength = Annotated[str | int | None, Option("Prompt lengths in tokens.", "N|LOW:HIGH")]
BatchSize = Annotated[int | None, Option("Prompts that run together; default: 4.")]
MaxNewTokens = Annotated[int | None, Option("Tokens to generate for each prompt; default: 32.")]
Chat = Annotated[bool, Option("Send prompts through the chat template.")]
Temperature = Annotated[float | None, Option("Sample at this temperature; 0 is greedy.")]
TopP = Annotated[float | None, Option("Sample from this probability mass.")]
TopK = Annotated[int | None, Option("Sample from so many tokens.")]
GenerationConfigFile = Annotated[
    str | Path | None, Option("Options of a generation_config.json.", "FILE")
]
Seed = Annotated[int | None, Option("Chooses prompts and their lengths; default: 0.")]
Limits = Annotated[str, Option("Limits of the noise ratios.", "NAME|FILE")]
AllowUnused = Annotated[
    str | Sequence[str] | None,
    Option("Modules, parameters or experts that may stay uncompared: model.visual.", "GLOB"),
]
TrustRemoteCode = Annotated[bool, Option("Run code that comes with the model.")]
Disk = Annotated[str | None, Option("Largest golden: 10G. A larger one is refused.", "SIZE")]
Keep = Annotated[
    KeptFiles, Option("replay omits what the candidate wrote, verdict also the golden.")
]
Timeout = Annotated[
    str | None,
    Option("Time that all processes may take: 30m; default: none, or 2h where CI is set.", "TIME"),
]
Output = Annotated[str | Path | None, Option("Default: runs/<time>-<command>.", "DIR")]


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


def seconds_of_timeout(timeout: str | None) -> float | None:
    """Return the time limit of a check; None for none. Raises: UsageError for another text than a time."""
    from assay.recording.capturing.budget import parse_time

    if timeout is None and ("CI" in os.environ or "GITHUB_ACTIONS" in os.environ):
        return _CI_SECONDS
    return None if timeout is None else parse_time(timeout)


def run_and_publish(
    run: "Callable[[Path, Progress], object]", folder: Path, max_seconds: float | None
) -> "CheckedVerdict":
    """Show the progress of `run`, which writes a verdict into `folder`, and write its report.

    max_seconds: for all processes of the run; None for any time.
    """
    from assay.launch import time_limit
    from assay.runs import open_progress, removed_if_refused

    with removed_if_refused(), time_limit(max_seconds), open_progress() as progress:
        run(folder, progress)
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return CheckedVerdict.publish(folder)
