"""The tables and numbers of docs/smoke.md, generated from axes and plans.

Write them by `python packages/smoke/tests/documented_tables.py docs/smoke.md`. A test compares them.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from assay_smoke.matrix.rules import AXES, RULES, Coverage, SmokePlan, plan_smoke


def document_tables() -> dict[str, str]:
    """Return each Markdown table by its mark: it stands between `<!-- MARK -->` and `<!-- end of MARK -->`."""
    return {
        "numbers": _numbers(),
        "axes": _axes_table(),
        "coverage": _coverage_table(),
    }


def with_tables(document: str) -> str:
    """Return `document` with current tables.

    Raises: ValueError if a mark is missing.
    """
    for mark, table in document_tables().items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = document.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the document has no marks for {mark!r}")
        document = f"{before}{begin}\n{table}\n\n{end}{after}"
    return document


_MOST_CARDS = 4


@cache
def _count_combinations() -> tuple[int, int]:
    """Count all combinations on up to `_MOST_CARDS` cards, and those that no rule refuses."""
    axes = {axis.name: axis.values for axis in AXES}
    axes["cards"] = tuple(cards for cards in axes["cards"] if int(cards) <= _MOST_CARDS)
    every = [dict(zip(axes, words, strict=True)) for words in product(*axes.values())]
    return len(every), sum(not any(rule.applies(words) for rule in RULES) for words in every)


@cache
def _plan(coverage: Coverage) -> SmokePlan:
    return plan_smoke(cards=_MOST_CARDS, coverage=coverage)


def _numbers() -> str:
    every, possible = _count_combinations()
    return (
        f"Of {every:,} combinations on 1, 2 or 4 cards, {possible:,} can run. These"
        f" {len(_plan('pairwise').cases)} have every possible pair of words, such\nas `fsdp` with `offload`."
    )


def _coverage_table() -> str:
    one, pairwise = _plan("one"), _plan("pairwise")
    covered = f"{one.pairs.covered} of {one.pairs.possible}"
    rows = [
        ("`one`", f"{len(one.cases)}: each framework once", covered),
        ("`pairwise`", str(len(pairwise.cases)), "all"),
        ("`full`", f"{_count_combinations()[1]:,}", "all"),
    ]
    return _markdown(("`--coverage`", "cases on 1, 2 and 4 cards", "pairs"), rows)


def _axes_table() -> str:
    rows = [
        (axis.name, " ".join(f"`{word}`" for word in axis.values), axis.meaning) for axis in AXES
    ]
    return _markdown(("axis", "words", "meaning"), rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
