"""Options that `check generate` and `capture` share."""

from typing import Annotated, Any

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
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts that run together.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
Chat = Annotated[bool, typer.Option("--chat", help="Send prompts through the chat template.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")
]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Sample from this probability mass.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from so many tokens.")]
GenerationConfigFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Options of a generation_config.json.")
]
Seed = Annotated[int, typer.Option(help="Chooses prompts and their lengths.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


# Options of the command line by the field of InputOptions that they set.
_FIELDS = {
    "prompts": "prompts", "prompt_length": "prompt_length", "batch_size": "batch_size",
    "max_new_tokens": "max_new_tokens", "chat": "chat", "seed": "seed", "temperature": "sampling",
    "top_p": "sampling", "top_k": "sampling", "generation_config": "sampling",
}  # fmt: skip


def given_options(context: typer.Context) -> frozenset[str]:
    """Fields of InputOptions that the user set on the command line."""
    return frozenset(
        field
        for name, field in _FIELDS.items()
        if (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    )


def sampling_options(
    temperature: float | None, top_p: float | None, top_k: int | None, config_file: str | None
) -> dict[str, Any]:
    """Options of `generate`; empty for plain greedy decoding.

    Raises: UsageError if the file asks for what cannot be.
    """
    from assay.cli.options.generation_config import choose_sampling, read_generation_config

    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    flags = {name: value for name, value in given.items() if value is not None}
    return choose_sampling(read_generation_config(config_file) if config_file else {}, flags)
