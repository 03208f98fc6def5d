"""The documentation site: README.md and docs/, where they are, and the API from its docstrings.

`nox -s docs` builds it. The source folder is the root of the repository, so that links between the
documents are the same here and on GitHub.
"""

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx

project = "assay"
html_title = "assay"
author = copyright = "the assay developers"

root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/site/*.md"]
exclude_patterns = [".*", "packages", "runners", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
mermaid_height = "auto"
mermaid_fullscreen = False
smartquotes_action = "D"  # dashes, and no curly quotes: they are copied into commands
default_role = "code"
autodoc_typehints = "none"  # `mark_fields` writes what the annotations of options say
autodoc_member_order = "bysource"

_REPOSITORY = "https://github.com/assay-project/assay"
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_PART = re.compile(r"^### (.+)\n((?:\n|\|.*\n)*)", re.MULTILINE)
_PAGE_OF_API = "docs/site/api"
_FIELD = re.compile(r"(\w+(?:, \w+)*): (.+)")


def setup(app: Sphinx) -> None:
    """Connect the functions below."""
    app.connect("source-read", link_to_repository)
    app.connect("source-read", list_pages)
    app.connect("autodoc-process-docstring", mark_fields)
    app.connect("autodoc-process-signature", omit_constructor)
    app.connect("build-finished", name_first_page)


def link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to files that are not pages, such as examples, to the repository."""
    folder = app.srcdir / Path(page).parent

    def point(link: re.Match[str]) -> str:
        path = (folder / link[0]).resolve()
        if (
            path.suffix == ".png"
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


def list_pages(_: Sphinx, page: str, source: list[str]) -> None:
    """Make the navigation from the README's list of documents."""
    if page != root_doc:
        return
    for title, table in _PART.findall(source[0].split("\n## Documentation\n")[1]):
        pages = re.findall(r"\]\((.+?)\.md\)", table)
        pages += [_PAGE_OF_API] if title == "Reference" else []
        listed = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n\n{listed}\n```\n"


def mark_fields(
    _: Sphinx, kind: str, __: str, documented: object, ___: object, lines: list[str]
) -> None:
    """Turn the lines "name: text" of a docstring, and the help of options, into fields."""
    if kind not in ("function", "method") or not callable(documented):
        return
    if not inspect.isroutine(documented):
        documented = type(documented).__call__
        lines[:] = (inspect.getdoc(documented) or "").splitlines()
    fields = read_options(documented)
    texts: list[str] = []
    told: list[list[str]] = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        names = match[1].split(", ") if match else []
        if match and fields.keys() >= set(names):
            told = [fields[name] for name in names]
            for one in told:
                one.append(match[2][0].upper() + match[2][1:])
        elif told and line.startswith("    "):
            for one in told:
                one[-1] += f" {line.strip()}"
        elif not line.startswith("Each option is described"):
            texts.append(line)
            told = []
    lines[:] = [
        *texts,
        "",
        *(mark_field(name, " ".join(one)) for name, one in fields.items() if one),
    ]


def mark_field(name: str, text: str) -> str:
    """Write a field of reStructuredText."""
    mark = {"Returns": "returns", "Raises": "raises"}.get(name, f"param {name}")
    return f":{mark}: " + re.sub(r"(?<![`-])--[\w-]+", r"`\g<0>`", text)


def read_options(function: Callable[..., object]) -> dict[str, list[str]]:
    """Return the help of each parameter, which is empty if the command line does not have it."""
    fields = {
        name: [note.help for note in getattr(parameter.annotation, "__metadata__", ())]
        for name, parameter in inspect.signature(function).parameters.items()
    }
    return fields | {"Returns": [], "Raises": []}


def omit_constructor(_: Sphinx, kind: str, *__: object) -> tuple[str, None] | None:
    """Hide how a class is made that assay makes itself."""
    return ("", None) if kind == "class" else None


def name_first_page(app: Sphinx, error: Exception | None) -> None:
    """Let the README be the first page of the site."""
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")
