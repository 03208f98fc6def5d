"""Combinations that are refused, as data, and the cases that remain for a plan.

A rule refuses the cases that have one of its words on every axis that it names. It cites a test or page that
shows why. The rules for all machines are in rules.toml, those for the cards of one vendor in vendors.toml, and
the cases of a plan in cases.toml.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from assay.devices.vendor_names import find_vendor_name
from assay.errors import UsageError
from assay.files import read_toml
from assay_smoke.matrix.cases import AXES, FEATURES, Case, case_of

# The vendor of machines without an accelerator.
HOST = "cpu"

_FOLDER = Path(__file__).parent

_TESTS = "packages/smoke/tests/unit/matrix/test_refusals.py::"


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to refuse cases."""

    name: str
    refuses: Mapping[str, frozenset[str]]
    """Words by axis. A case with one of them on each of these axes is refused."""
    reason: str
    """One sentence for a user who asked for such a case."""
    shown_by: str
    """FILE::TEST of this repository, or an address."""

    def applies(self, words: Mapping[str, str]) -> bool:
        """Return whether the rule refuses the case with these words by axis."""
        return all(words[axis] in refused for axis, refused in self.refuses.items())

    def describe(self) -> str:
        """Describe the combination, as in "framework pipeline, recompute"."""
        parts = []
        for axis in AXES:
            words = [word for word in axis.values if word in self.refuses.get(axis.name, ())]
            if words == [axis.name]:
                parts.append(axis.name)
            elif words and len(words) < len(axis.values):
                parts.append(f"{axis.name} {' or '.join(words)}")
        return ", ".join(parts)


def refusing(*, name: str, reason: str, shown_by: str, **words: str | Iterable[str]) -> Rule:
    """Make a rule from one or several words per axis.

    Raises: ValueError for an unknown axis or word, since such a rule would refuse nothing.
    """
    known = {axis.name: axis.values for axis in AXES}
    refuses = {
        axis: frozenset([one] if isinstance(one, str) else one) for axis, one in words.items()
    }
    for axis, asked in refuses.items():
        if not asked or not asked <= {*known.get(axis, ())}:
            raise ValueError(f"rule {name}: the axis {axis} lacks some of {sorted(asked)}")
    return Rule(name, MappingProxyType(refuses), reason, shown_by)


def _read_rules(entries: Iterable[Mapping[str, Any]], prefix: str = "") -> tuple[Rule, ...]:
    """Make the rules of a file's entries. prefix: of their names."""
    return tuple(
        refusing(
            name=prefix + entry["name"],
            reason=entry["reason"],
            shown_by=entry["shown_by"] if "/" in entry["shown_by"] else _TESTS + entry["shown_by"],
            **entry["words"],
        )
        for entry in entries
    )


RULES = _read_rules(read_toml(_FOLDER / "rules.toml")["refuses"])


def check_compatible(case: Case, rules: Iterable[Rule] = RULES) -> str | None:
    """Return the reason of the first rule that refuses `case`, or None."""
    return next((rule.reason for rule in rules if rule.applies(case.words)), None)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_FOLDER / "vendors.toml")


def vendor_names() -> tuple[str, ...]:
    """Return the vendors in the order of their file."""
    return tuple(_tables())


def require_vendor(name: str) -> str:
    """Return the vendor that is called `name`. Raises: UsageError if it has no table."""
    vendor = find_vendor_name(name)
    if vendor not in _tables():
        raise UsageError(f"--vendor {name}: there is {', '.join(vendor_names())}")
    return vendor


def rules_of_vendor(vendor: str) -> tuple[Rule, ...]:
    """Return the rules for the vendor's cards alone; none for a vendor without a table."""
    return _read_rules(_tables().get(vendor, {}).get("refuses", ()), f"{vendor}-")


def rules_for(vendor: str) -> tuple[Rule, ...]:
    """Return all rules that hold on the vendor's cards."""
    return (*RULES, *rules_of_vendor(vendor))


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
