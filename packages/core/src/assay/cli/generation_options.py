"""Options that `check generate` and `capture` share."""

from typing import Annotated

import typer

Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='One prompt a line: {"prompt": TEXT}, {"ids": [...]} or {"messages": [...]}.',
    ),
]
PromptLength = Annotated[
    str | None, typer.Option(metavar="N|LOW:HIGH", help="Prompt lengths in tokens.")
]
BatchSize = Annotated[int | None, typer.Option(help="Prompts that run together; default: 4.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Tokens to generate for each prompt; default: 32.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Send prompts through the chat template.")]
Temperature = Annotated[float | None, typer.Option(help="Sample at this temperature; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Sample from this probability mass.")]
TopK = Annotated[int | None, typer.Option(help="Sample from so many tokens.")]
GenerationConfigFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Options of a generation_config.json.")
]
AllowUnused = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Modules, parameters or experts that may stay uncompared: model.visual; repeatable.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Chooses prompts and their lengths; default: 0.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
