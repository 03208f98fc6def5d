"""Convert the call of an API function to a command line."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
