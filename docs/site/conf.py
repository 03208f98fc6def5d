"""The documentation site: README.md and docs/, where they are, and the API from its docstrings.

`nox -s docs` builds it. The source folder is the root of the repository, so that links between the
documents are the same here and on GitHub.
"""

import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from sphinx.application import Sphinx

from assay.cli.application import app as assay_app
from assay.cli.application import build_command

project = "assay"
html_title = "assay"
author = copyright = "the assay developers"

root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/site/*.md",
    "runners/README.md",
    "runners/*/README.md",
]
exclude_patterns = [".*", "packages", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_numpy_docstring = False
html_theme = "furo"
html_copy_source = html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes, and no curly quotes: they are copied into commands
default_role = "code"
highlight_language = "text"  # of blocks without a language: outputs
autodoc_typehints = "none"  # `describe_options` writes what the annotations of options say
autodoc_member_order = "bysource"

_REPOSITORY = "https://github.com/assay-project/assay"
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_PART = re.compile(r"^## (.+)\n((?:\n|\|.*\n)*)", re.MULTILINE)
_PAGE_OF_COMMANDS = "docs/site/commands"
_PAGE_OF_MACHINES = "runners/README"
_UNPUBLISHED = ("assay runners",)
_GENERATED = [f"/{_PAGE_OF_COMMANDS}", "/docs/site/api"]
_OPTION = re.compile(r"(?<![`-])--[\w-]+")
_FIELD = re.compile(r":param (\w+): (.+)")


def setup(app: Sphinx) -> None:
    """Connect the functions below."""
    app.connect("source-read", link_to_repository)
    app.connect("source-read", list_pages)
    app.connect("source-read", write_commands)
    app.connect("autodoc-process-docstring", describe_call, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", describe_options, priority=600)
    app.connect("autodoc-process-signature", omit_constructor)
    app.connect("build-finished", name_first_page)


def link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to files that are not pages, such as examples, to the repository."""
    folder = app.srcdir / Path(page).parent

    def point(link: re.Match[str]) -> str:
        path = (folder / link[0]).resolve()
        if (
            path.suffix in {".png", ".svg"}
            or not path.exists()
            or app.project.path2doc(path) in app.project.docnames
        ):
            return link[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{_REPOSITORY}/{kind}/main/{path.relative_to(app.srcdir)}"

    parts = _FENCE.split(source[0])
    source[0] = "".join(
        part if part.startswith("```") else _LINK.sub(point, part) for part in parts
    )


def list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the navigation: the tables of docs/README.md, and the vendors under the machines."""
    if page == _PAGE_OF_MACHINES:
        machines = sorted((app.srcdir / "runners").glob("*/README.md"))
        source[0] += _hidden_list("", [f"/runners/{one.parent.name}/README" for one in machines])
    if page != root_doc:
        return
    source[0] += _hidden_list("", ["/docs/README"])
    tables = (app.srcdir / "docs/README.md").read_text(encoding="utf-8")
    for title, table in _PART.findall(tables):
        found = re.findall(r"\]\((.+?)\.md\)", table)
        pages = [f"/docs/{name}".replace("/docs/../", "/") for name in found]
        pages += _GENERATED if title == "Reference" else []
        source[0] += _hidden_list(title, pages)


def _hidden_list(title: str, pages: list[str]) -> str:
    if not pages:
        return ""
    options = [":hidden:", *([f":caption: {title}"] if title else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def write_commands(_: Sphinx, page: str, source: list[str]) -> None:
    """Write a table of all commands, and the help of each, into the page of commands."""
    if page != _PAGE_OF_COMMANDS:
        return
    helps = dict(_describe_command(build_command(assay_app), "assay"))
    source[0] += "\n| | |\n|---|---|\n"
    for words, text in helps.items():
        summary = re.split(r"(?<=[.?])\s|\n\n", text.split("\n\n", 1)[1], maxsplit=1)[0]
        anchor = words.replace(" ", "-")
        source[0] += f"| [{words}](#{anchor}) | {' '.join(summary.split())} |\n"
    for words, text in helps.items():
        source[0] += f"\n## {words}\n\n```text\n{text}\n```\n"


def _describe_command(command: Any, words: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - of click
    """Yield the words and the help of each command of published packages."""
    for name, one in command.commands.items():
        inner = f"{words} {name}"
        if inner in _UNPUBLISHED or one.hidden:
            continue
        if hasattr(one, "commands"):
            yield from _describe_command(one, inner)
        else:
            with typer.Context(one, info_name=inner) as context:
                yield inner, one.get_help(context)


def describe_call(
    _: Sphinx, kind: str, __: str, documented: object, ___: object, lines: list[str]
) -> None:
    """Describe an object that is used as a function by the docstring of its call."""
    if kind == "function" and callable(documented) and not inspect.isroutine(documented):
        lines[:] = (inspect.getdoc(type(documented).__call__) or "").splitlines()


def describe_options(
    _: Sphinx, __: str, ___: str, documented: object, ____: object, lines: list[str]
) -> None:
    """Write the help of each option before what the docstring says about its parameter."""
    if not inspect.isroutine(documented):
        return
    fields = {
        name: [note.help for note in getattr(parameter.annotation, "__metadata__", ())]
        for name, parameter in inspect.signature(documented).parameters.items()
    }
    texts: list[str] = []
    field: list[str] | None = None
    for line in lines:
        if match := _FIELD.fullmatch(line):
            field = fields.setdefault(match[1], [])
            field.append(match[2])
        elif field is not None and line.startswith(" "):
            field.append(line.strip())
        else:
            texts.append(line)
            field = None
    place = next((number for number, line in enumerate(texts) if line[:1] == ":"), len(texts))
    written = (f":param {name}: {' '.join(words)}" for name, words in fields.items() if words)
    texts[place:place] = ["", *(_OPTION.sub(r"`\g<0>`", line) for line in written)]
    lines[:] = texts


def omit_constructor(_: Sphinx, kind: str, *__: object) -> tuple[str, None] | None:
    """Hide how a class is made that assay makes itself."""
    return ("", None) if kind == "class" else None


def name_first_page(app: Sphinx, error: Exception | None) -> None:
    """Let the README be the first page of the site."""
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")
