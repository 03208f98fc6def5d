"""Selects cases that represent a whole matrix.

one: one case per framework, with as many pairs of words as possible.
pairwise: cases that together have every pair of words that any case has.
full: every case.

The selection depends on the matrix alone. It is the same on every machine and in every run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from assay_smoke.matrix.axes import NAMES, Values
from assay_smoke.matrix.search import Chosen, Matrix, Order, Pair, pairs_of

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
