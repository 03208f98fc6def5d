"""A session in two sentences, for its page and for the terminal."""

from collections import Counter

from assay.verdicts import Outcome
from assay_smoke.session.results import SessionReport


def outcomes_in_words(report: SessionReport) -> str:
    """Describe outcomes, as in "1 FAIL, 7 PASS (2 left something unchecked) on cpu"."""
    counts = sorted(Counter(case.word for case in report.cases).items())
    unchecked = sum(case.outcome is Outcome.PASS and bool(case.reason) for case in report.cases)
    left = f" ({unchecked} left something unchecked)" if unchecked else ""
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    return f"{words}{left} on {report.device}"


def extent_in_words(report: SessionReport) -> str:
    """As in "8 cases in 2 min 05 s, 362 of 575 pairs of values that can meet"."""
    number = len(report.cases)
    said = f"{number} case{'' if number == 1 else 's'} in {duration(report.seconds)}"
    if not report.pairs_possible:  # cases that were named make no plan
        return said
    pairs = f"{report.pairs_covered} of {report.pairs_possible}"
    return f"{said}, {pairs} pairs of values that can meet"


def duration(seconds: float) -> str:
    """As in "0.4 s" or "2 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
