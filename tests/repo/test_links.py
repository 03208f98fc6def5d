"""Relative links in every Markdown file resolve."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def broken_links(document: Path) -> Iterator[str]:
    """Targets in `document` that name a file or heading that does not exist."""
    text = document.read_text(encoding="utf-8")
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in heading_anchors(path)):
            yield target


def heading_anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_resolve(root: Path, find_files: Callable[[str], list[Path]]) -> None:
    broken = {
        str(document.relative_to(root)): list(broken_links(document))
        for document in find_files("*.md")
    }
    assert {name: targets for name, targets in broken.items() if targets} == {}


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("[a](absent.md)", ["absent.md"]),
        ("[a](#no-such)", ["#no-such"]),
        ("[a](page.md#two-words)", []),
        ("[a](https://example.org)", []),
        ("```\n[a](absent.md)\n```", []),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, broken: list[str]) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"# Two words\n\n{link}\n", encoding="utf-8")
    assert list(broken_links(document)) == broken
