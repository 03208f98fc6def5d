"""A change from one capture to another, as a person reads it in a pull request."""

from collections.abc import Iterable, Iterator

from assay_expectations.judging.changes import Change
from assay_expectations.records import Expectation


def change_as_markdown(expected: Expectation, actual: Expectation, change: Change) -> str:
    """A section: the kind of change, ratios, tokens that moved furthest, and what else differs."""
    return "\n".join(_lines(expected, actual, change)) + "\n"


def _lines(expected: Expectation, actual: Expectation, change: Change) -> Iterator[str]:
    yield f"### {actual.model} on {actual.provenance.run}: {change.kind}"
    yield ""
    yield f"{change.summary[:1].upper()}{change.summary[1:]}."
    if change.judged is not None:
        yield from ("", "| statistic | ratio to the noise before | limit |", "|---|---|---|")
        for one in change.judged.judged:
            mark = " **over**" if one.failed else ""
            yield f"| {one.ratio.statistic} | {one.ratio.value:.3g}x{mark} | {one.limit:g}x |"
    if change.moved:
        yield from ("", "Tokens that moved furthest (in units of the noise before):", "")
        yield "| batch, row, token | units | id | log-probability before | now |"
        yield "|---|---|---|---|---|"
        for token in change.moved:
            name = "all others" if token.id is None else token.id
            yield (
                f"| {token.batch}, {token.row}, {token.position} | {token.units:.3g} | {name} |"
                f" {token.expected:.6g} | {token.actual:.6g} |"
            )
        yield ""
        yield (
            f"In which layer: `assay check generate {actual.model} --reference cpu/float32 --candidate"
            f" {actual.provenance.run}`, or `--golden DIR` in place of the reference where a golden was"
            " kept."
        )
    yield from _listed("What else changed since the capture before", change.environment)
    yield from _listed("Provenance", _provenance(expected, actual))


def _listed(title: str, items: Iterable[str]) -> Iterator[str]:
    found = list(items)
    if found:
        yield from ("", f"{title}:", "", *(f"- {item}" for item in found))


def _provenance(expected: Expectation, actual: Expectation) -> Iterator[str]:
    for word, one in (("before", expected), ("now", actual)):
        date = one.provenance.process.get("date", "at an unknown date")
        approved = one.provenance.approved_by or "nobody"
        reason = f": {one.provenance.reason}" if one.provenance.reason else ""
        yield f"{word}: {date}, {len(one.captures)} captures, approved by {approved}{reason}"
