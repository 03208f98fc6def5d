"""The text of `--help` and of wrong options: the same for every command, in all versions of typer.

Typer prints Python types, cuts the summaries of commands, breaks words at hyphens, and proposes `--help` for `--step`.
"""

import inspect
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

_MOST_COLUMNS = 80
_WIDEST_NAME = 30
# Example: assay check generate ...
_EXAMPLE = re.compile(r"([A-Z][\w ]*): ((?:assay|nox) .+)", re.DOTALL)
_LAST_BRACKETS = re.compile(r"\[[^\[\]]*\]$")
_FIXED_SPACE = "\N{NO-BREAK SPACE}"


def use_plain_help(command: Any) -> None:  # noqa: ANN401 - click's, or typer's copy
    """Make `command` and all commands of its group print help, usage and wrong options by the functions below."""
    command.parse_args = partial(_parse_words, command, command.parse_args)
    command.get_help = partial(describe_command, command)
    command.get_usage = partial(describe_usage, command)
    for one in getattr(command, "commands", {}).values():
        use_plain_help(one)


def _parse_words(command: Any, parse: Callable[..., Any], context: Any, words: list[str]) -> Any:  # noqa: ANN401
    """Parse the words of a command line.

    Raises: click's error. That of an unknown option names the right one, that of a value has no words of pydantic.
        Click takes the last of several values of an option that has one, so this is an error.
    """
    given = [*words]
    try:
        rest = parse(context, words)
        *_, order = command.make_parser(context).parse_args(given)
        for one, number in Counter(order).items():
            has_one_value = one.param_type_name == "option" and not (one.multiple or one.is_flag)
            if number > 1 and has_one_value:
                context.fail(f"{one.opts[0]} is given {number} times, and takes one value")
    except Exception as error:
        if hasattr(error, "possibilities") and hasattr(error, "option_name"):
            name, error.possibilities = str(error.option_name), None
            error.message = f"No such option: {name}{_suggest(name, command)}"  # type: ignore[attr-defined]
        elif isinstance(message := getattr(error, "message", None), str):
            from assay.files import describe_problem

            error.message = describe_problem(message)  # type: ignore[attr-defined]
        raise
    return rest


def _suggest(name: str, command: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    """Return the argument or the nearest option that is meant by an unknown option; "" without one."""
    meant: dict[str, str] = {}
    for one in command.params:
        if one.param_type_name == "option":
            meant |= {option.lstrip("-"): f"did you mean {option}?" for option in one.opts}
        else:
            argument = _title_of(one)
            meant[str(one.name)] = f"{argument} is an argument: write its value without {name}"
    nearest = get_close_matches(name.lstrip("-"), meant, n=1)
    return f"; {meant[nearest[0]]}" if nearest else ""


def describe_command(command: Any, context: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    """Return the help of a command, or of a group with its commands."""
    width, inner = _width(context), getattr(command, "commands", None)
    lines = [describe_usage(command, context)]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += ["", *_describe_paragraph(paragraph, width)]
    for title, rows in _sections(command.get_params(context), context).items():
        lines += ["", f"{title}:", *_columns(rows, width)]
    if inner is not None:
        names = command.list_commands(context)
        shown = [name for name in names if not inner[name].hidden]
        lines += ["", "Commands:"]
        lines += _columns([(name, _summary_of(inner[name])) for name in shown], width)
    text = "\n".join(lines).replace(_FIXED_SPACE, " ")
    own = "-".join(context.command_path.split()[1:])
    return re.sub(r"<time>-[\w-]*<command>", f"<time>-{own}", text)


def describe_usage(command: Any, context: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    """Return the first line of the help, which errors print as well."""
    words = [context.command_path, "[OPTIONS]"]
    arguments = (one for one in command.get_params(context) if one.param_type_name == "argument")
    words += [_usage_of(one) for one in arguments]
    words += ["COMMAND [ARGS]..."] if hasattr(command, "commands") else []
    return "\n".join(_fill(" ".join(words), _width(context), "Usage: ", " " * 7))


def _width(context: Any) -> int:  # noqa: ANN401 - click's, or typer's copy
    columns = context.terminal_width or shutil.get_terminal_size().columns
    return int(max(min(columns, _MOST_COLUMNS) - 2, 50))


def _name_of(argument: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    return argument.metavar or str(argument.name).upper()


def _title_of(argument: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    """Return the name without the brackets of an optional argument."""
    return re.sub(r"^\[(.+)\]((?:\.\.\.)?)$", r"\1\2", _name_of(argument))


def _usage_of(argument: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    name = _name_of(argument)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _summary_of(command: Any) -> str:  # noqa: ANN401 - click's, or typer's copy
    """Return the first paragraph of a command's help."""
    return " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())


def _sections(parameters: Iterable[Any], context: Any) -> dict[str, list[tuple[str, str]]]:  # noqa: ANN401
    """Return name and help of parameters by heading; options before the first heading are "Options"."""
    sections: dict[str, list[tuple[str, str]]] = {}
    heading = "Options"
    for one in parameters:
        record = one.get_help_record(context)
        if record is None:
            continue
        name, text = record
        title = "Arguments"
        if one.param_type_name == "argument":
            name = _title_of(one)
        else:
            title = heading = getattr(one, "rich_help_panel", None) or heading
        sections.setdefault(title, []).append((name, text))
    return sections


def _describe_paragraph(text: str, width: int) -> Iterator[str]:
    """Wrap a paragraph; a command is broken so that it can be copied."""
    words = " ".join(text.split())
    example = _EXAMPLE.fullmatch(words)
    if example is None:
        yield from _fill(words, width, "  ", "  ")
        return
    title, command = example.groups()
    command = re.sub(r"(--?[\w-]+) (?!-)", rf"\1{_FIXED_SPACE}", command)  # an option and its value
    lines = _fill(command, width - 2, f"  {title}: ", "    ")
    yield from (f"{line} \\" for line in lines[:-1])
    yield lines[-1]


def _columns(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Lay out names and their texts. A name that is too long gets a line of its own."""
    indent = min(max(len(name) for name, _ in rows), _WIDEST_NAME) + 4
    for name, text in rows:
        # A default or a condition in brackets stays together.
        kept = _LAST_BRACKETS.sub(lambda found: found[0].replace(" ", _FIXED_SPACE), text)
        lines = _fill(kept, width, " " * indent, " " * indent)
        if len(name) + 4 > indent or not lines:
            yield f"  {name}"
            yield from lines
        else:
            yield f"  {name}".ljust(indent) + lines[0].lstrip(" ")
            yield from lines[1:]


def _fill(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
