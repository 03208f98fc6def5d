"""Records with hostile text in every place, and what each output format must not let through."""

import copy
import re
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

POISON = (
    "\x1b[2J\x07\x9b\u202e\u2066\u2028\u0085\r\n::error::x\n  ::set-output name=a::b ##[error]c"
    " @maintainer fixes #1 GH-2 https://evil.example www.evil.example"
    " <img src=x onerror=y></style><script>z</script> [l](javascript:x) `code` | ~~s~~ **b**"
)

_HIDDEN = set(
    "\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)

_Record = TypeVar("_Record", bound=BaseModel)


def poisoned(record: _Record, text: str = POISON) -> Iterator[tuple[str, _Record]]:
    """Yield the record with one string or key replaced, for every place whose schema takes it."""
    content = record.model_dump(mode="json", by_alias=True)
    for path in list(_places(content)):
        changed = copy.deepcopy(content)
        _replace(changed, path, text)
        try:
            yield ".".join(map(str, path)), type(record).model_validate(changed)
        except ValidationError:
            continue


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key, "KEY")
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*path, index))


def _replace(content: Any, path: tuple[Any, ...], text: str) -> None:
    *parents, last = path
    if last == "KEY":
        *parents, key = parents
        for step in parents:
            content = content[step]
        content[text] = content.pop(key)
        return
    for step in parents:
        content = content[step]
    content[last] = text


def assert_harmless_text(text: str) -> None:
    """Fail where a terminal or a log would obey `text`."""
    bad = [
        letter
        for letter in text
        if letter in _HIDDEN
        or (unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs") and letter not in "\n\t")
    ]
    assert bad == []
    assert not [line for line in text.split("\n") if line.lstrip().startswith("::")]
    assert "##[" not in text


def assert_harmless_markdown(text: str) -> None:
    """Fail where GitHub would obey `text`: a mention, a link, a reference, an element."""
    assert_harmless_text(text)
    outside = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"(?<!\\)`[^`\n]+`", "", outside).replace("<!-- -->", "\0")
    assert not re.search(r"@\w|#\d|\bGH-\d|://|\bwww\.|<(img|script|/style)|(?<!\\)\]\(", outside)


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs), (tag, attrs)


def assert_harmless_html(page: str) -> None:
    """Fail where a browser would obey text of `page`, or turn its writing direction."""
    assert [letter for letter in page if letter in _HIDDEN or letter in "\x1b\x07\x9b\u2028"] == []
    assert "img" not in _Tags(page).found
    assert "<script>z" not in page
