"""Locations of traces: local folders and URLs."""

import re
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError

_LOCAL = "file://"


@dataclass(frozen=True, slots=True)
class Url:
    """A URL of remote storage. `/` appends a name, as for a path."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.text.rstrip('/')}/{name}")


def parse_location(text: str | Path | Url) -> Path | Url:
    """Parse a folder or a URL; `file://` stands for a folder.

    Raises: UsageError if the URL holds a password, which would be printed and stored.
    """
    if isinstance(text, (Path, Url)):
        return text
    if "://" not in text:
        return Path(text)
    if text.startswith(_LOCAL):
        return Path(text.removeprefix(_LOCAL))
    if re.search(r"://[^/@]*:[^/]*@", text):
        scheme = text.partition("://")[0]
        raise UsageError(
            f"the {scheme}:// URL holds a password: give it where other tools for {scheme} read it"
        )
    return Url(text)
