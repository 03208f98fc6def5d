"""Every published bug: those that are planted, and why the others are not."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from packages.core.tests.faults.published.generation import generation
from packages.core.tests.faults.published.planted import Planted
from packages.core.tests.faults.published.ranks import ranks
from packages.core.tests.faults.published.training import training

BUGS = Path(__file__).parent / "bugs.toml"


@dataclass(frozen=True)
class PublishedBug:
    """An entry of `bugs.toml`, which says what each is."""

    title: str
    source: str
    size: str
    traincheck: str = ""
    not_planted: str = ""


@cache
def published_bugs() -> dict[str, PublishedBug]:
    """All of them by their name."""
    entries = tomllib.loads(BUGS.read_text(encoding="utf-8"))
    return {name: PublishedBug(**entry) for name, entry in entries.items()}


def planted_bugs() -> Iterator[Planted]:
    """Those that are planted, each at least once."""
    for part in (generation, training, ranks):
        yield from part()


def choose_bugs(part: str) -> list[Planted]:
    """Those whose name contains `part`. Raises: UsageError for none: nothing would fail."""
    chosen = [one for one in planted_bugs() if part in one.bug or part in one.plant]
    if not chosen:
        raise pytest.UsageError(f"--published-bug {part}: none that is planted has such a name")
    return chosen
