"""Which cases of a matrix stand for all of them.

one: each framework once, with what covers the most pairs of words.
pairwise: cases that together have every pair of words that any case has.
full: every case.

All of it depends on the matrix alone: the same on every machine and in every run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from assay_smoke.matrix.axes import NAMES, Values
from assay_smoke.matrix.search import Chosen, Matrix, Order, Pair, pairs_of

Coverage = Literal["one", "pairwise", "full"]

_FRAMEWORK = NAMES.index("framework")


def choose_cases(matrix: Matrix, coverage: Coverage) -> list[Values]:
    """The cases of `matrix` that give the `coverage`."""
    if coverage == "full":
        return list(matrix.cases())
    return _one_of_each_framework(matrix) if coverage == "one" else _pairwise(matrix)


def covered_pairs(cases: Iterable[Values]) -> set[Pair]:
    """The pairs of words that any of `cases` has."""
    return {pair for case in cases for pair in pairs_of(case)}


def _one_of_each_framework(matrix: Matrix) -> list[Values]:
    missing = set(matrix.pairs)
    cases = []
    for framework in matrix.axes[_FRAMEWORK].values:
        case = matrix.find({_FRAMEWORK: framework}, _most_of(missing))
        if case is not None:
            missing -= covered_pairs([case])
            cases.append(case)
    return cases


def _pairwise(matrix: Matrix) -> list[Values]:
    cases = _generated(matrix)
    missing = set(matrix.pairs) - covered_pairs(cases)
    while missing:
        # From the last axes: what rules leave fewest cases for.
        pair = max(missing)
        case = matrix.find(dict(pair), _most_of(missing))
        if case is None:
            raise AssertionError(f"the search has lost a case with {pair}")
        cases.append(case)
        missing -= covered_pairs([case])
    return _without_spare(_made_plain(_without_spare(cases), matrix))


def _generated(matrix: Matrix) -> list[Values]:
    """Cases of allpairspy, which ends where a filter leads it astray: pairs may be missing."""
    from allpairspy import AllPairs

    num_axes = len(matrix.axes)

    def is_allowed(words: Sequence[str]) -> bool:
        chosen: Chosen = [*words, *[None] * (num_axes - len(words))]
        return matrix.allows(chosen, len(words) - 1)

    generated = AllPairs([list(axis.values) for axis in matrix.axes], filter_func=is_allowed)
    return [tuple(words) for words in generated]


def _most_of(missing: set[Pair]) -> Order:
    """An order that tries words first that make the most of the `missing` pairs."""

    def by_gain(chosen: Chosen, number: int, words: Sequence[str]) -> Sequence[str]:
        others = [(other, word) for other, word in enumerate(chosen) if word is not None]

        def gain(word: str) -> int:
            here = (number, word)
            return sum((min(here, other), max(here, other)) in missing for other in others)

        return sorted(words, key=gain, reverse=True)

    return by_gain


def _made_plain(cases: Sequence[Values], matrix: Matrix) -> list[Values]:
    """`cases` with the plainest words that still cover all pairs: fewer cards, fewer features."""
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


def _without_spare(cases: Sequence[Values]) -> list[Values]:
    """`cases` without those whose pairs the others have too; those on most cards go first."""
    counts = Counter(pair for case in cases for pair in pairs_of(case))
    kept = list(cases)
    cards = NAMES.index("cards")
    for case in sorted(cases, key=lambda case: (-int(case[cards]), case)):
        if all(counts[pair] > 1 for pair in pairs_of(case)):
            counts.subtract(pairs_of(case))
            kept.remove(case)
    return kept
