"""Options of the API functions, from which the command line is derived.

A parameter with an `Option` in its annotation is an option of the command; others exist in Python only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line describes a parameter."""

    help: str
    metavar: str | None = None


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
Output = Annotated[str | Path | None, Option("Default: runs/<time>-<command>.", "DIR")]
