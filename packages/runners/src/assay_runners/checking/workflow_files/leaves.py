"""Every value of a file that holds no other, with its place."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from assay_runners.fleet.entries import GitHub


@dataclass(frozen=True)
class Leaf:
    """A value, and where it is.

    place: "jobs.smoke.steps[].run"; shown: the same with the numbers of list entries, from 1.
    """

    place: str
    shown: str
    value: object
    line: int

    @property
    def key(self) -> str:
        """What it is the value of; in a list, of the list."""
        return self.place.rsplit(".", 1)[-1].removesuffix("[]")


def leaves(node: object, place: str = "", shown: str = "", line: int = 1) -> Iterator[Leaf]:
    """All leaves below `node`; an empty mapping or list is one."""
    if isinstance(node, CommentedMap) and node:
        for key, value in node.items():
            at = node.lc.data[key][0] + 1 if key in (node.lc.data or {}) else line
            dot = "." if place else ""
            yield from leaves(value, f"{place}{dot}{key}", f"{shown}{dot}{key}", at)
    elif isinstance(node, CommentedSeq) and node:
        for number, value in enumerate(node):
            at = node.lc.data[number][0] + 1 if number in (node.lc.data or {}) else line
            yield from leaves(value, f"{place}[]", f"{shown}[{number + 1}]", at)
    else:
        yield Leaf(place, shown, node, line)


def written(value: object) -> object:
    """A value as it is compared: white space between words has no effect."""
    return " ".join(value.split()) if isinstance(value, str) else value


def fill(text: str, names: Mapping[str, str]) -> str:
    """`text` with what `<name>` stands for."""
    return re.sub(r"<(\w+)>", lambda found: names.get(found[1], found[0]), text)


def names_of(github: GitHub) -> dict[str, str]:
    """What `<protected>` and the like stand for."""
    return {
        "repository": github.repository, "protected": github.protected_ref,
        "group": github.runner_group, "hosted": github.hosted,
        "nightly": github.nightly, "reaper": github.reaper,
    }  # fmt: skip
