"""The values of a file that contain no other value, each with its place."""

from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap, CommentedSeq


@dataclass(frozen=True)
class Scalar:
    """A value without parts. An empty mapping or list counts as one."""

    place: str
    """The path: "jobs.smoke.steps[].run"."""
    numbered: str
    """The path with the numbers of list entries, from 1: "jobs.smoke.steps[2].run"."""
    value: object
    line: int

    @property
    def key(self) -> str:
        """The last key of the path."""
        return self.place.rsplit(".", 1)[-1].removesuffix("[]")


def find_scalars(
    node: object, place: str = "", numbered: str = "", line: int = 1
) -> Iterator[Scalar]:
    """Yield all scalars below `node`."""
    if isinstance(node, CommentedMap) and node:
        for key, value in node.items():
            at = node.lc.data[key][0] + 1 if key in (node.lc.data or {}) else line
            dot = "." if place else ""
            yield from find_scalars(value, f"{place}{dot}{key}", f"{numbered}{dot}{key}", at)
    elif isinstance(node, CommentedSeq) and node:
        for number, value in enumerate(node):
            at = node.lc.data[number][0] + 1 if number in (node.lc.data or {}) else line
            yield from find_scalars(value, f"{place}[]", f"{numbered}[{number + 1}]", at)
    else:
        yield Scalar(place, numbered, node, line)
