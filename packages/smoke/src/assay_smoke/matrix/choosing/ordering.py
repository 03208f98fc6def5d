"""The order in which cases are worth their time."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay_smoke.matrix.axes import values_of
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.search import Pair, pairs_of


@dataclass(frozen=True, slots=True)
class ValuedCase:
    """A case at its place in the order.

    new_pairs: pairs of words that no case before it has.
    """

    case: Case
    new_pairs: tuple[Pair, ...]


def by_value(
    cases: Sequence[Case],
    urgency: Callable[[Case], tuple[bool, ...]],
    expected_seconds: Callable[[Case], float],
) -> list[ValuedCase]:
    """`cases`, the most valuable first.

    urgency: the largest first; among the equally urgent, most new pairs for each second come first.
    """
    groups: defaultdict[tuple[bool, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[urgency(case)].append(case)
    bits = _Bits()
    seen = 0
    ordered = []
    for group in sorted(groups, reverse=True):
        for case, new in _by_new_pairs(groups[group], expected_seconds, bits, seen):
            seen |= new
            ordered.append(ValuedCase(case, bits.pairs_in(new)))
    return ordered


class _Bits:
    """Sets of pairs as integers with a bit for each: thousands of cases are ordered at once."""

    def __init__(self) -> None:
        self._numbers: dict[Pair, int] = {}

    def of(self, case: Case) -> int:
        """The pairs of `case`."""
        bits = 0
        for pair in pairs_of(values_of(case)):
            bits |= 1 << self._numbers.setdefault(pair, len(self._numbers))
        return bits

    def pairs_in(self, bits: int) -> tuple[Pair, ...]:
        """The pairs in a set, in their order."""
        if not bits:
            return ()
        return tuple(sorted(pair for pair, number in self._numbers.items() if bits >> number & 1))


def _by_new_pairs(
    cases: Sequence[Case], expected_seconds: Callable[[Case], float], bits: _Bits, seen: int
) -> Iterator[tuple[Case, int]]:
    """Each case with the set of its new pairs; `seen` are those of cases before all of these."""
    sets = [bits.of(case) for case in cases]
    seconds = [max(expected_seconds(case), 1e-9) for case in cases]

    def entry(number: int) -> tuple[float, float, str, int]:
        gain = (sets[number] & ~seen).bit_count()
        return -gain / seconds[number], seconds[number], cases[number].id, number

    queue = [entry(number) for number in range(len(cases))]
    heapq.heapify(queue)
    while queue:
        number = queue[0][-1]
        # Gains only shrink: what is still first after its gain was counted anew is first.
        if (renewed := entry(number)) > queue[0]:
            heapq.heapreplace(queue, renewed)
            continue
        heapq.heappop(queue)
        yield cases[number], sets[number] & ~seen
        seen |= sets[number]
