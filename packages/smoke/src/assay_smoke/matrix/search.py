"""The possible cases of one machine, found by search.

The search chooses a word on one axis after the other and leaves a branch as soon as a rule applies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product

from assay_smoke.matrix.axes import NAMES, Axis, Values
from assay_smoke.matrix.rules import Rule

# Two axes by number, the lower first, each with a word.
Pair = tuple[tuple[int, str], tuple[int, str]]

# The words that a rule refuses, by axis number.
_Refused = list[tuple[int, frozenset[str]]]

# The words of a partial case; None on axes without a choice yet.
Chosen = Sequence[str | None]

# Orders the words of an axis, given the partial case and the number of the axis.
Order = Callable[[Chosen, int, Sequence[str]], Sequence[str]]


class Matrix:
    """The axes of a machine and the rules that hold there."""

    def __init__(self, axes: Sequence[Axis], rules: Sequence[Rule]) -> None:
        self.axes = tuple(axes)
        self.rules = tuple(rules)
        # By axis number, the rules that name the axis.
        self._refused_on: list[list[_Refused]] = [[] for _ in self.axes]
        for rule in rules:
            refused = [(NAMES.index(axis), words) for axis, words in rule.refuses.items()]
            for number, _ in refused:
                self._refused_on[number].append(refused)

    def allows(self, chosen: Chosen, newest: int) -> bool:
        """Return whether no rule applies to `chosen`. newest: the axis whose word was chosen last."""
        return not any(
            all(chosen[number] in words for number, words in refused)
            for refused in self._refused_on[newest]
        )

    def cases(self) -> Iterator[Values]:
        """Yield every case that no rule refuses."""
        return self._search({}, _plainest_first)

    def find(self, wanted: Mapping[int, str], order: Order | None = None) -> Values | None:
        """Return the first case with the `wanted` words, given by axis number, or None.

        order: order in which to try words; by default the plainest first.
        """
        return next(self._search(wanted, order or _plainest_first), None)

    @cached_property
    def pairs(self) -> frozenset[Pair]:
        """Find every pair of words that some case has."""
        found: set[Pair] = set()
        for pair in self._all_pairs():
            if pair not in found and (case := self.find(dict(pair))):
                found.update(pairs_of(case))
        return frozenset(found)

    @cached_property
    def refused_pairs(self) -> dict[Pair, tuple[Rule, ...]]:
        """Find every pair of words that no case has, with a minimal set of rules that excludes it."""
        return {
            pair: self._rules_against(pair) for pair in self._all_pairs() if pair not in self.pairs
        }

    def _rules_against(self, pair: Pair) -> tuple[Rule, ...]:
        for rule in self.rules:
            if Matrix(self.axes, [rule]).find(dict(pair)) is None:
                return (rule,)
        needed = list(self.rules)
        for rule in self.rules:
            others = [other for other in needed if other is not rule]
            if Matrix(self.axes, others).find(dict(pair)) is None:
                needed = others
        return tuple(needed)

    def _all_pairs(self) -> Iterator[Pair]:
        for first, second in combinations(range(len(self.axes)), 2):
            for one, other in product(self.axes[first].values, self.axes[second].values):
                yield (first, one), (second, other)

    def _search(self, wanted: Mapping[int, str], order: Order) -> Iterator[Values]:
        # Wanted words are chosen first, so that words that exclude each other end the search.
        numbers = [*wanted, *(n for n in range(len(self.axes)) if n not in wanted)]
        words = [(wanted[n],) if n in wanted else self.axes[n].values for n in range(len(numbers))]
        chosen: list[str | None] = [None] * len(numbers)

        def choose(position: int) -> Iterator[Values]:
            if position == len(numbers):
                yield tuple(word for word in chosen if word is not None)
                return
            number = numbers[position]
            for word in order(chosen, number, words[number]):
                chosen[number] = word
                if self.allows(chosen, number):
                    yield from choose(position + 1)
            chosen[number] = None

        return choose(0)


def pairs_of(values: Values) -> Iterator[Pair]:
    """Yield the pairs of words of a case."""
    return combinations(enumerate(values), 2)


def pair_in_words(pair: Pair) -> str:
    """Describe a pair, as in "framework fsdp + lora no"."""
    return " + ".join(
        word if word == NAMES[number] else f"{NAMES[number]} {word}" for number, word in pair
    )


def _plainest_first(chosen: Chosen, number: int, words: Sequence[str]) -> Sequence[str]:
    del chosen, number
    return words
