"""Combinations that are refused, as data. Each rule cites a test or page that shows it.

A rule refuses the cases that have one of its words on every axis that it names. The rules for all machines are
in rules.toml, those for the cards of one vendor in vendors.toml.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from assay.devices.vendor_names import find_vendor_name
from assay.errors import UsageError
from assay.files import read_toml
from assay_smoke.matrix.cases import AXES, Case

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
