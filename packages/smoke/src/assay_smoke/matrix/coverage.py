"""Finds the possible cases of one machine, and selects cases that represent them.

The search chooses a word on one axis after the other and leaves a branch as soon as a rule applies.
A selection depends on the matrix alone. It is the same on every machine and in every run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product
from typing import Literal

from assay_smoke.matrix.cases import NAMES, Axis, Values
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


# one: one case per framework, with as many pairs of words as possible.
# pairwise: cases that together have every pair of words that any case has.
# full: every case.
Coverage = Literal["one", "pairwise", "full"]

_FRAMEWORK = NAMES.index("framework")


def choose_cases(matrix: Matrix, coverage: Coverage) -> list[Values]:
    """Return cases of `matrix` with the requested coverage."""
    if coverage == "full":
        return list(matrix.cases())
    return _one_of_each_framework(matrix) if coverage == "one" else _pairwise(matrix)


def covered_pairs(cases: Iterable[Values]) -> set[Pair]:
    """Return the pairs of words in `cases`."""
    return {pair for case in cases for pair in pairs_of(case)}


def _one_of_each_framework(matrix: Matrix) -> list[Values]:
    missing = set(matrix.pairs)
    cases = []
    for framework in matrix.axes[_FRAMEWORK].values:
        case = matrix.find({_FRAMEWORK: framework}, _prefer_missing(missing))
        if case is not None:
            missing -= covered_pairs([case])
            cases.append(case)
    return cases


def _pairwise(matrix: Matrix) -> list[Values]:
    cases = _generated(matrix)
    missing = set(matrix.pairs) - covered_pairs(cases)
    while missing:
        # Pairs of the last axes come first: rules leave fewest cases for them.
        pair = max(missing)
        case = matrix.find(dict(pair), _prefer_missing(missing))
        if case is None:
            raise AssertionError(f"the search lost the case with {pair}")
        cases.append(case)
        missing -= covered_pairs([case])
    return _drop_redundant(_simplify(_drop_redundant(cases), matrix))


def _generated(matrix: Matrix) -> list[Values]:
    """Generate cases by allpairspy. Its filter can end the search early, so pairs may be missing."""
    from allpairspy import AllPairs

    num_axes = len(matrix.axes)

    def is_allowed(words: Sequence[str]) -> bool:
        chosen: Chosen = [*words, *[None] * (num_axes - len(words))]
        return matrix.allows(chosen, len(words) - 1)

    generated = AllPairs([list(axis.values) for axis in matrix.axes], filter_func=is_allowed)
    return [tuple(words) for words in generated]


def _prefer_missing(missing: set[Pair]) -> Order:
    """Return an order that first tries the words with most of the `missing` pairs."""

    def by_gain(chosen: Chosen, number: int, words: Sequence[str]) -> Sequence[str]:
        others = [(other, word) for other, word in enumerate(chosen) if word is not None]

        def gain(word: str) -> int:
            here = (number, word)
            return sum((min(here, other), max(here, other)) in missing for other in others)

        return sorted(words, key=gain, reverse=True)

    return by_gain


def _simplify(cases: Sequence[Values], matrix: Matrix) -> list[Values]:
    """Replace words by plainer ones, such as fewer cards, where all pairs stay covered."""
    plain = list(cases)
    counts = Counter(pair for case in cases for pair in pairs_of(case))
    for place, case in enumerate(cases):
        changed = case
        for number, axis in enumerate(matrix.axes):
            if number == _FRAMEWORK:
                continue
            for word in axis.values[: axis.values.index(changed[number])]:
                other = (*changed[:number], word, *changed[number + 1 :])
                lost = [pair for pair in pairs_of(changed) if (number, changed[number]) in pair]
                if matrix.allows(other, number) and all(counts[pair] > 1 for pair in lost):
                    counts.subtract(lost)
                    counts.update(pair for pair in pairs_of(other) if (number, word) in pair)
                    changed = other
                    break
        plain[place] = changed
    return plain


def _drop_redundant(cases: Sequence[Values]) -> list[Values]:
    """Drop cases whose pairs the others cover, those with most cards first."""
    counts = Counter(pair for case in cases for pair in pairs_of(case))
    kept = list(cases)
    cards = NAMES.index("cards")
    for case in sorted(cases, key=lambda case: (-int(case[cards]), case)):
        if all(counts[pair] > 1 for pair in pairs_of(case)):
            counts.subtract(pairs_of(case))
            kept.remove(case)
    return kept
