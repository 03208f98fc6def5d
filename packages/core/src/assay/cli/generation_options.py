"""Options that `check generate` and `capture` share."""

from typing import Annotated, Any

import typer

Prompts = Annotated[
    str | None, typer.Option(metavar="FILE.jsonl", help="Prompts, one JSON object a line.")
]
PromptLength = Annotated[
    str | None, typer.Option(metavar="N|LOW:HIGH", help="Prompt lengths in tokens.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts that run together.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
Chat = Annotated[bool, typer.Option("--chat", help="Send prompts through the chat template.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sample at this temperature.")]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Sample from this probability mass.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from so many tokens.")]
GenerationConfigFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Sampling options of a generation_config.json.")
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
    """Options of `generate` for sampling; empty for greedy decoding.

    Raises: UsageError if the file is no JSON object.
    """
    options: dict[str, Any] = {}
    if config_file is not None:
        options |= _read_config(config_file)
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    options |= {name: value for name, value in given.items() if value is not None}
    if options:
        options.setdefault("do_sample", True)
    return options


def _read_config(path: str) -> dict[str, Any]:
    import json
    from pathlib import Path

    from assay.errors import UsageError

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"generation config {path}: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"generation config {path} is no JSON object")
    known = (
        "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
        "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
        "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    )  # fmt: skip
    return {name: data[name] for name in known if data.get(name) is not None}
