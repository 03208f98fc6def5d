"""Fills a template of the folder `templates/`, quoting each value for the language around it."""

import json
import shlex
from pathlib import Path

import jinja2


def fill(name: str, **values: object) -> str:
    """The text of `templates/NAME.jinja` with `values` in it; a value that it lacks is an error."""
    return _TEMPLATES.get_template(f"{name}.jinja").render(values)


def _quote_for_containerfile(text: str) -> str:
    """A value of ENV or ARG, in which nothing is a variable."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # noqa: S701 - no HTML; each language has a filter of its own
)
_TEMPLATES.filters |= {
    "containerfile": _quote_for_containerfile,
    "json": json.dumps,  # every JSON string is also a YAML string
    "shell": shlex.quote,
}
