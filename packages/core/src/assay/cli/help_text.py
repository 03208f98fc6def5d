"""The text of `--help`: the same for every command, in all versions of typer.

Typer prints Python types, cuts the summaries of commands, and breaks words at hyphens.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

_MOST_COLUMNS = 80
_WIDEST_NAME = 30
# Example: assay check generate ...
_EXAMPLE = re.compile(r"([A-Z][\w ]*): ((?:assay|nox) .+)", re.DOTALL)
_LAST_BRACKETS = re.compile(r"\[[^\[\]]*\]$")
_FIXED_SPACE = "\N{NO-BREAK SPACE}"


def use_plain_help(command: Any) -> None:  # noqa: ANN401 - click's, or typer's copy
    """Make `command` and all commands of its group print their help and usage by the functions below."""
    command.get_help = partial(describe_command, command)
    command.get_usage = partial(describe_usage, command)
    for one in getattr(command, "commands", {}).values():
        use_plain_help(one)


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
            name = re.sub(r"^\[(.+)\]((?:\.\.\.)?)$", r"\1\2", _name_of(one))
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
