"""Commands derived from API functions: each option is a parameter with an `Option`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from assay.api import options
from assay.api.options import Option
from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def _help_of(option: Any) -> str:  # noqa: ANN401 - an annotation with an `Option`
    return str(option.__metadata__[0].help)


# Of commands that are written by hand.
AllowUnused = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB", help=f"{_help_of(options.AllowUnused).removesuffix('.')}; repeatable."
    ),
]


def derive_command(
    function: "Callable[..., CheckedVerdict]", help_text: str
) -> Callable[..., None]:
    """Return a command that calls `function` and exits with the code of its verdict.

    Omitted options keep the function's default.
    """

    @with_options_of(function)
    def command(
        *,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
        ] = False,
        **given: Any,  # noqa: ANN401 - as typer parsed them
    ) -> None:
        from assay.cli.ending import end_with

        end_with(function(**read_values(function, given)), as_json=as_json)

    command.__doc__ = help_text
    return command


def with_options_of(
    function: Callable[..., object],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the `**given` of a command by the options of `function`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[:-1]
        derived = derive_parameters(function)
        positional = [one for one in derived if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        rest = [one for one in derived if one.kind is inspect.Parameter.KEYWORD_ONLY]
        places = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        keywords = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY]
        parameters = [*places, *positional, *rest, *keywords]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer read the parameters with an `Option` of a command that is written by hand."""
    parameters = [
        one.replace(annotation=Annotated[get_args(one.annotation)[0], _describe(one, option)])
        if (option := _find_option(one))
        else one
        for one in inspect.signature(command).parameters.values()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def derive_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of the command for `function`, as typer reads them."""
    return [
        _derive_parameter(one, option)
        for one in inspect.signature(function).parameters.values()
        if (option := _find_option(one)) is not None
    ]


def read_values(function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `function` for the values that typer parsed.

    Raises: UsageError for an item of a mapping that is not NAME=VALUE, or repeats a name.
    """
    parameters = inspect.signature(function).parameters
    return {
        name: _parse_pairs(name, value) if _is_mapping(parameters[name]) else value
        for name, value in given.items()
        if value not in (None, [])
    }


def _find_option(parameter: inspect.Parameter) -> Option | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((one for one in metadata if isinstance(one, Option)), None)


def _derive_parameter(parameter: inspect.Parameter, option: Option) -> inspect.Parameter:
    kind = _command_line_type(get_args(parameter.annotation)[0])
    if kind == list[str] and parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        option = replace(option, help=f"{option.help.removesuffix('.')}; repeatable.")
    info = _describe(parameter, option)
    default = parameter.default
    if default in (None, ()):
        kind, default = kind | None, None
    return parameter.replace(annotation=Annotated[kind, info], default=default)


def _describe(parameter: inspect.Parameter, option: Option) -> Any:  # noqa: ANN401 - of typer
    """Describe a parameter for typer: a positional one is an argument."""
    metavar = option.metavar or _metavar_of(get_args(parameter.annotation)[0])
    words: dict[str, Any] = {"metavar": metavar, "help": option.help}
    words["rich_help_panel"] = option.group
    words["envvar"] = option.variable
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return typer.Argument(**words)
    flag = parameter.name.removeprefix("as_").replace("_", "-")
    return typer.Option(f"--{flag}", min=option.minimum, **words)


def _metavar_of(annotation: object) -> str | None:
    """Return what `--help` shows for the value of an option without a metavar; None for a flag."""
    kinds = [one for one in _members(annotation) if one is not type(None)]
    if any(get_origin(one) is Literal for one in kinds):
        return "|".join(str(value) for one in kinds for value in get_args(one))
    names = {int: "N", float: "X", Path: "PATH"}
    return next((names[one] for one in kinds if one in names), None)


def _command_line_type(annotation: object) -> Any:  # noqa: ANN401 - a type that typer parses
    """Return the type that the command line parses."""
    members = [one for one in _members(annotation) if one is not type(None)]
    if any(get_origin(one) in (Sequence, Mapping) for one in members):
        return list[str]
    if len(members) == 1 and (
        members[0] in (bool, int, float) or get_origin(members[0]) is Literal
    ):
        return members[0]
    return str


def _members(annotation: object) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_mapping(parameter: inspect.Parameter) -> bool:
    annotation = get_args(parameter.annotation)[0]
    return any(get_origin(one) is Mapping for one in _members(annotation))


def _parse_pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"{name.replace('_', ' ')} {text!r} is not of the form NAME=VALUE")
        if key in pairs:
            raise UsageError(f"{name.replace('_', ' ')} {key} is given twice")
        pairs[key] = value
    return pairs
