"""Every value of a file that holds no other, with its place."""

from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap, CommentedSeq


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
