"""Options of the API functions, from which the command line is derived, and the run of a check.

Parameters without an `Option` in their annotation exist in Python only.
"""

import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from assay.errors import UsageError
from assay.foreign_text import shorten
from assay.sites import KeptFiles

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict
    from assay.generate.spec import InputOptions
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
    group: str | None = None
    """The heading in `--help` of this option and of those after it, up to the next heading."""


Model = Annotated[str, Option("Folder, hub name, or micro:RECIPE.", "MODEL")]
_SIDES = "Reference and candidate"
Reference = Option("The trusted device: cpu/float32.", "RUN", group=_SIDES)
Candidate = Annotated[
    str, Option("The device and dtype to judge: sim/bfloat16.", "RUN", group=_SIDES)
]
Prompts = Annotated[
    str | Path | None,
    Option(
        'One prompt a line: {"prompt": TEXT}, {"prompt": TEXT, "images": [FILE, ...]}, {"ids": [...]} or'
        ' {"messages": [...]}. Or an expectation, for its token ids.',
        "FILE.jsonl",
        group="Inputs",
    ),
]
PromptLength = Annotated[str | int | None, Option("Prompt lengths in tokens.", "N|LOW:HIGH")]
BatchSize = Annotated[int | None, Option("Prompts that run together; default: 4.")]
MaxNewTokens = Annotated[int | None, Option("Tokens to generate for each prompt; default: 32.")]
Chat = Annotated[bool, Option("Send prompts through the chat template.")]
Temperature = Annotated[float | None, Option("Sample at this temperature; 0 is greedy.")]
TopP = Annotated[float | None, Option("Sample from this probability mass.")]
TopK = Annotated[int | None, Option("Sample from the K most likely tokens.", "K")]
GenerationConfigFile = Annotated[
    str | Path | None, Option("Options of a generation_config.json.", "FILE")
]
Seed = Annotated[int | None, Option("Seed of the prompts and their lengths; default: 0.")]
Limits = Annotated[
    str,
    Option(
        "Limits of the noise ratios: noise, training, ascend, or a TOML file.",
        "NAME|FILE",
        group="Judgment",
    ),
]
AllowUnused = Annotated[
    str | Sequence[str] | None,
    Option("Modules, parameters or experts that may stay uncompared: model.visual.", "GLOB"),
]
TrustRemoteCode = Annotated[bool, Option("Run code that comes with the model.")]
Disk = Annotated[
    str | None,
    Option(
        "Refuse a golden that is larger than this, such as 10G.", "SIZE", group="Time and space"
    ),
]
Keep = Annotated[
    KeptFiles, Option("What to keep: everything, the golden (replay), or only the verdict.")
]
Timeout = Annotated[
    str | None,
    Option(
        "Time limit for all processes, such as 30m; default: none, or 2h where CI is set.", "TIME"
    ),
]
Output = Annotated[
    str | Path | None, Option("Default: runs/<time>-<command>.", "DIR", group="Output")
]


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
    from assay.recording.limits import parse_time

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
        with progress.step("writing the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return CheckedVerdict.publish(folder)


# Options by range. Only sampling reads:
_SAMPLING = {
    "temperature": (0.0, None), "top_k": (0, None), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0), "epsilon_cutoff": (0.0, 1.0), "eta_cutoff": (0.0, 1.0),
}  # fmt: skip
_FLAGS = {"temperature": (0.0, None), "top_k": (1, None), "top_p": (0.0, 1.0)}
# Greedy decoding also reads:
_PENALTIES = {"repetition_penalty": (0.0, None), "no_repeat_ngram_size": (0, None)}
_LISTS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")
_PASSED_ON = (*_SAMPLING, *_PENALTIES, *_LISTS)

# Ignored: assay sets length and outputs; ids come from the tokenizer and the model.
_LEFT_OUT = {
    "_commit_hash", "_from_model_config", "bos_token_id", "decoder_start_token_id", "eos_token_id",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "return_dict_in_generate", "transformers_version",
}  # fmt: skip
# Values without effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "cache_implementation": ("dynamic", "hybrid"), "diversity_penalty": (0,),
    "early_stopping": (False,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "length_penalty": (1,), "num_beam_groups": (1,),
    "num_beams": (1,), "num_return_sequences": (1,), "remove_invalid_values": (False,),
    "renormalize_logits": (False,), "use_cache": (True,),
}  # fmt: skip


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Read the options of the file that affect the choice of tokens.

    Raises: UnreadableFileError; UsageError for keys and values that are not supported.
    """
    from assay.files import read_json_object  # with pydantic, which --help does not need

    data = read_json_object(Path(path))
    given = {name: value for name, value in data.items() if value is not None}
    refused = [
        f"{name}={json.dumps(value)}"
        for name, value in given.items()
        if _is_unsupported(name, value)
    ]
    if refused:
        raise UsageError(
            f"generation config {path}: {shorten(', '.join(refused))} cannot be used; assay generates one"
            f" sequence, greedily or by sampling, with: do_sample, {', '.join(_PASSED_ON)}"
        )
    return {name: value for name, value in given.items() if name in (*_PASSED_ON, "do_sample")}


def choose_sampling(from_file: dict[str, Any], from_flags: dict[str, Any]) -> dict[str, Any]:
    """Merge the options of `generate`; flags override the file. Empty for plain greedy decoding.

    A flag requests sampling. So does the file, by `do_sample` or, without it, by an option that only
    sampling reads. A temperature of 0 is greedy.

    Raises: UsageError for a flag that is out of range.
    """
    for name, value in from_flags.items():
        low, high = _FLAGS[name]
        if _is_outside(value, low, high):
            at_most = "" if high is None else f" and at most {high:g}"
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {value}: must be a number of at least {low:g}{at_most}")
    options = from_file | from_flags
    asked = bool(from_flags) or from_file.get("do_sample", bool(from_file.keys() & _SAMPLING))
    if asked and options.get("temperature") != 0:
        return options | {"do_sample": True}
    greedy = {name: options[name] for name in (*_PENALTIES, *_LISTS) if name in options}
    return greedy | {"do_sample": False} if greedy else {}


def _is_unsupported(name: str, value: object) -> bool:
    if name == "do_sample":
        return not isinstance(value, bool)
    if name in _LISTS:
        return not isinstance(value, list)
    if name in _NEUTRAL:
        return value not in _NEUTRAL[name]
    bounds = _SAMPLING.get(name) or _PENALTIES.get(name)
    if bounds is None:
        return name not in _LEFT_OUT
    return _is_outside(value, *bounds)


def _is_outside(value: object, low: float, high: float | None) -> bool:
    """Return True unless `value` is a number of the type of `low` within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | type(low)):
        return True
    return not low <= value < math.inf or (high is not None and value > high)


def input_options(  # noqa: PLR0913 - one for each option
    *,
    prompts: Prompts = None,
    prompt_length: PromptLength = None,
    batch_size: BatchSize = None,
    max_new_tokens: MaxNewTokens = None,
    chat: Chat = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    generation_config: GenerationConfigFile = None,
    seed: Seed = None,
) -> "InputOptions":
    """Return the requested inputs. `model_fields_set` names the given options.

    Raises: UsageError for a value out of range, and for a file with an unsupported setting.
    """
    from pydantic import ValidationError

    from assay.files import describe_problem
    from assay.generate.spec import InputOptions

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
        raise UsageError(f"{option} {first['input']}: {describe_problem(first['msg'])}") from None


def globs(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the GLOBs of an option that accepts one or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())
