"""Pages and text files from templates."""

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from assay.foreign_text import escape_controls


def page_environment(templates: Path) -> Environment:
    """Make the environment of the templates in a folder.

    Every value is escaped: as HTML, and its control characters as visible text.
    """
    return Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_value,
    )


def text_environment(templates: Path) -> Environment:
    """Make the environment of templates for TOML and YAML. The filter `quoted` writes a value."""
    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=False,  # noqa: S701 - not HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = json.dumps
    return environment


def _escape_value(value: object) -> object:
    return (
        escape_controls(value)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )
