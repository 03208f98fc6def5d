"""The cases of a plan, from the table in cases.toml, and the pairs of words that they cover."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Literal

from assay.files import read_toml
from assay_smoke.matrix.cases import AXES, FEATURES, Case, case_of
from assay_smoke.matrix.rules import Rule, check_compatible

# Two axes in the order of `AXES`, each with a word.
Pair = tuple[tuple[str, str], tuple[str, str]]

# one: one case per framework.
# pairwise: cases that together have every pair of words that any case has.
# full: every case.
Coverage = Literal["one", "pairwise", "full"]

_TABLE = Path(__file__).with_name("cases.toml")


def choose_cases(coverage: Coverage, cards: int, rules: Iterable[Rule]) -> list[Case]:
    """Return the cases with this coverage that use at most `cards` cards and that no rule refuses."""
    if coverage == "full":
        return list(_every_case(cards, rules))
    fitting = [case for case in _table()[coverage] if case.cards <= cards]
    possible = [case for case in fitting if check_compatible(case, rules) is None]
    return _without_redundant(possible) if coverage == "pairwise" else possible


def pairs_of(case: Case) -> Iterator[Pair]:
    """Yield the pairs of words of a case."""
    return combinations(case.words.items(), 2)


def covered_pairs(cases: Iterable[Case]) -> set[Pair]:
    """Return the pairs of words in `cases`."""
    return {pair for case in cases for pair in pairs_of(case)}


def pair_in_words(pair: Pair) -> str:
    """Describe a pair, as in "framework fsdp + lora no"."""
    return " + ".join(word if word == axis else f"{axis} {word}" for axis, word in pair)


@cache
def _table() -> dict[str, list[Case]]:
    return {coverage: [*map(case_of, ids)] for coverage, ids in read_toml(_TABLE).items()}


def _every_case(cards: int, rules: Iterable[Rule]) -> Iterator[Case]:
    for values in product(*(axis.values for axis in AXES)):
        words = dict(zip((axis.name for axis in AXES), values, strict=True))
        if int(words["cards"]) <= cards and not any(rule.applies(words) for rule in rules):
            features = {words.pop(name) for name in FEATURES} - {"no"}
            yield Case.model_validate(words | {"features": features})


def _without_redundant(cases: Iterable[Case]) -> list[Case]:
    """Take the cases that add a pair, then drop those whose pairs the later ones have as well."""
    taken: list[Case] = []
    for case in cases:
        if not covered_pairs([case]) <= covered_pairs(taken):
            taken.append(case)
    counts = Counter(pair for case in taken for pair in pairs_of(case))
    kept = []
    for case in taken:
        if all(counts[pair] > 1 for pair in pairs_of(case)):
            counts.subtract(pairs_of(case))
        else:
            kept.append(case)
    return kept
