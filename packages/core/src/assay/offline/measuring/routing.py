"""Detection of expert choices that differ at a near tie of router scores. They are not errors.

A token that goes to another expert has other values from there on, and later tokens attend to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from assay.dumps.protocol import Dump
from assay.locating.routing import find_choice, may_be_routing, near_tie_rows
from assay.offline.ports.lanes import Lane, LanePair, Port, read_shared
from assay.offline.tokens.passes import Pass, PassPair, take_rows

# Returns the expected root mean square error of router scores, from their port and values.
ScoreNoise = Callable[[Port, Tensor], float]


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that a router sent to other experts at a near tie."""

    order: int
    """Position of the router in the network."""
    module: str
    prompt: int
    position: int


def find_flips(
    pairs: Sequence[LanePair],
    passes: Sequence[PassPair],
    expected: Dump,
    actual: Dump,
    score_noise: ScoreNoise,
) -> list[Flip]:
    """Return the near-tie flips of all routers in network order."""
    routers: dict[str, dict[str, LanePair]] = {}
    for lanes in pairs:
        if lanes.port.direction == "output" and lanes.port.phase == "forward":
            routers.setdefault(lanes.port.module, {})[lanes.port.name] = lanes
    found: list[Flip] = []
    for lanes_of in routers.values():
        dtypes = {
            lanes.expected.first.dtype.startswith(("int", "uint")) for lanes in lanes_of.values()
        }
        if dtypes == {True, False}:
            for pair in passes:
                found += _find_in_pass(lanes_of, pair.by_row(), expected, actual, score_noise)
    return sorted(found, key=lambda flip: flip.order)


def _find_in_pass(
    lanes_of: Mapping[str, LanePair], pair: PassPair, expected: Dump, actual: Dump,
    score_noise: ScoreNoise,
) -> Iterator[Flip]:  # fmt: skip
    values: dict[str, Tensor] = {}
    references: dict[str, Tensor] = {}
    for name, lanes in lanes_of.items():
        ours = _rows_of(actual, lanes.actual, pair.actual, pair.actual_rows)
        theirs = _rows_of(expected, lanes.expected, pair.expected, pair.expected_rows)
        if ours is not None and theirs is not None:
            values[name], references[name] = ours, theirs
    if not may_be_routing(references) or pair.rows is None:
        return
    choice = find_choice(values, references)
    if choice is None:
        return
    of_indices, of_scores = choice
    scores = references[of_scores]
    error = score_noise(lanes_of[of_scores].port, scores)
    flipped = near_tie_rows(values[of_indices], references[of_indices], scores, error)
    lane = lanes_of[of_indices].expected
    for number in flipped.nonzero()[:, 0].tolist():
        prompt, position = pair.rows.prompts[number], pair.rows.positions[number][0]
        if position >= 0:
            yield Flip(lane.order, lane.port.module, prompt, position)


def _rows_of(dump: Dump, lane: Lane, of_pass: Pass, numbers: Tensor | None) -> Tensor | None:
    """Return the rows of the paired tokens, (R, C); None unless all ranks hold the same ones."""
    values = read_shared(dump, lane.held_in(of_pass))
    taken = take_rows(values, of_pass, numbers) if values is not None else None
    return taken[0][:, 0] if taken is not None and bool(taken[1].all()) else None
