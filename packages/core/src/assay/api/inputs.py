"""Prompts and the choice of tokens, from options that may be left out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.api import options
from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.generate.processes.requests import InputOptions


def input_options(  # noqa: PLR0913 - one for each option
    *,
    prompts: options.Prompts = None,
    prompt_length: options.PromptLength = None,
    batch_size: options.BatchSize = None,
    max_new_tokens: options.MaxNewTokens = None,
    chat: options.Chat = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    generation_config: options.GenerationConfigFile = None,
    seed: options.Seed = None,
) -> "InputOptions":
    """Return the requested inputs. `model_fields_set` names the options that were given.

    Raises: UsageError for a value out of range, and for a file with an unsupported setting.
    """
    from pydantic import ValidationError

    from assay.api.generation_config import choose_sampling, read_generation_config
    from assay.generate.processes.requests import InputOptions

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    from_flags = {name: value for name, value in sampling.items() if value is not None}
    given: dict[str, Any] = {
        "prompts": None if prompts is None else str(prompts),
        "prompt_length": None if prompt_length is None else str(prompt_length),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "chat": chat or None,
        "seed": seed,
    }
    if from_flags or generation_config is not None:
        from_file = {} if generation_config is None else read_generation_config(generation_config)
        given["sampling"] = choose_sampling(from_file, from_flags)
    try:
        return InputOptions(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise UsageError(f"{option} {first['input']}: {first['msg']}") from None


def globs(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the GLOBs of an option that takes one or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())
