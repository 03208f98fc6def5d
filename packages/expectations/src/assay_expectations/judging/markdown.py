"""A change between two captures as Markdown for a pull request. All text from records is escaped."""

import shlex
from collections.abc import Iterable, Iterator

from assay.foreign_text import escape_markdown, markdown_code
from assay_expectations.judging.changes import Change
from assay_expectations.records import Expectation

_LAYERS_SHOWN = 5


def change_as_markdown(expected: Expectation, actual: Expectation, change: Change) -> str:
    """Format the kind of change, ratios, tokens, modules, and other differences."""
    return "\n".join(_lines(expected, actual, change)) + "\n"


def _lines(expected: Expectation, actual: Expectation, change: Change) -> Iterator[str]:
    yield f"### {escape_markdown(f'{actual.model} on {actual.provenance.run}: {change.kind}')}"
    yield ""
    yield f"{escape_markdown(change.summary[:1].upper() + change.summary[1:])}."
    if change.judged is not None:
        yield from (
            "",
            "| statistic | error | ratio to the older noise | limit |",
            "|---|---|---|---|",
        )
        for one in change.judged.judged:
            mark = " **over**" if one.failed else ""
            statistic = escape_markdown(one.ratio.statistic)
            ratio = f"{one.ratio.actual:.3g} | {one.ratio.value:.3g}x{mark}"
            yield f"| {statistic} | {ratio} | {one.limit:g}x |"
    if change.moved:
        yield from ("", "Tokens that moved most (in units of the older noise):", "")
        yield "| batch, row, token | units | id | log-probability before | now |"
        yield "|---|---|---|---|---|"
        for token in change.moved:
            name = "all others" if token.id is None else escape_markdown(str(token.id))
            yield (
                f"| {token.batch}, {token.row}, {token.position} | {token.units:.3g} | {name} |"
                f" {token.expected:.6g} | {token.actual:.6g} |"
            )
        yield from _layers(expected, actual, change)
    yield from _listed("Other changes since the older capture", change.environment)
    yield from _listed("Provenance", _provenance(expected, actual))


def _layers(expected: Expectation, actual: Expectation, change: Change) -> Iterator[str]:
    """List modules with larger errors, and the command that finds the operation."""
    yield ""
    if change.grown:
        yield "Modules with a larger error than before. The first one causes the change:"
        yield from ("", "| module | relative error before | now |", "|---|---|---|")
        for layer in change.grown[:_LAYERS_SHOWN]:
            yield f"| {escape_markdown(layer.module or '(model)')} | {layer.before:.3g} | {layer.now:.3g} |"
        if (more := len(change.grown) - _LAYERS_SHOWN) > 0:
            yield f"| and {more} more | | |"
    elif expected.layers and actual.layers:
        yield "No module has a clearly larger error than before."
    else:
        yield "One of the captures has no errors of modules."
    yield ""
    words = ["assay", "check", "generate", actual.model, "--reference", "cpu/float32"]
    command = shlex.join([*words, "--candidate", actual.provenance.run])
    yield f"To find the operation: {markdown_code(command)}."


def _listed(title: str, items: Iterable[str]) -> Iterator[str]:
    found = list(items)
    if found:
        yield from ("", f"{title}:", "", *(f"- {escape_markdown(item)}" for item in found))


def _provenance(expected: Expectation, actual: Expectation) -> Iterator[str]:
    for word, one in (("before", expected), ("now", actual)):
        date = one.provenance.process.get("date", "unknown date")
        approved = one.provenance.approved_by or "nobody"
        reason = f": {one.provenance.reason}" if one.provenance.reason else ""
        yield f"{word}: {date}, {len(one.captures)} captures, approved by {approved}{reason}"
