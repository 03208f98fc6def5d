"""Orders cases by value: new pairs of words per second."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay_smoke.matrix.axes import values_of
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.search import Pair, pairs_of


@dataclass(frozen=True, slots=True)
class OrderedCase:
    """A case at its place in the order."""

    case: Case
    new_pairs: tuple[Pair, ...]
    """Pairs of words that no earlier case has."""


def order_by_value(
    cases: Sequence[Case],
    urgency: Callable[[Case], tuple[bool, ...]],
    expected_seconds: Callable[[Case], float],
) -> list[OrderedCase]:
    """Order `cases` by falling urgency, then by new pairs per second."""
    groups: defaultdict[tuple[bool, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[urgency(case)].append(case)
    bits = _Bits()
    seen = 0
    ordered = []
    for group in sorted(groups, reverse=True):
        for case, new in _by_new_pairs(groups[group], expected_seconds, bits, seen):
            seen |= new
            ordered.append(OrderedCase(case, bits.pairs_in(new)))
    return ordered


class _Bits:
    """Sets of pairs as integers with one bit per pair, for the speed of set operations."""

    def __init__(self) -> None:
        self._numbers: dict[Pair, int] = {}

    def of(self, case: Case) -> int:
        bits = 0
        for pair in pairs_of(values_of(case)):
            bits |= 1 << self._numbers.setdefault(pair, len(self._numbers))
        return bits

    def pairs_in(self, bits: int) -> tuple[Pair, ...]:
        """Return the pairs of a set, sorted."""
        if not bits:
            return ()
        return tuple(sorted(pair for pair, number in self._numbers.items() if bits >> number & 1))


def _by_new_pairs(
    cases: Sequence[Case], expected_seconds: Callable[[Case], float], bits: _Bits, seen: int
) -> Iterator[tuple[Case, int]]:
    """Yield each case with the set of its new pairs. seen: the pairs of all earlier cases."""
    sets = [bits.of(case) for case in cases]
    seconds = [max(expected_seconds(case), 1e-9) for case in cases]

    def entry(number: int) -> tuple[float, float, str, int]:
        gain = (sets[number] & ~seen).bit_count()
        return -gain / seconds[number], seconds[number], cases[number].id, number

    queue = [entry(number) for number in range(len(cases))]
    heapq.heapify(queue)
    while queue:
        number = queue[0][-1]
        # Gains only shrink, so a case that stays first after its gain is recounted is the best.
        if (renewed := entry(number)) > queue[0]:
            heapq.heapreplace(queue, renewed)
            continue
        heapq.heappop(queue)
        yield cases[number], sets[number] & ~seen
        seen |= sets[number]
