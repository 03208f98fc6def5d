"""A comparison as Markdown for a job summary."""

from collections.abc import Iterator

from assay.foreign_text import escape_markdown, markdown_code
from assay_bench.comparing.judging import EvaluationComparison, TaskComparison
from assay_bench.comparing.pairing import Pair
from assay_bench.comparing.verdicts import measure_in_words

_FLIPS_SHOWN = 5
_MOST_CHARACTERS = 120


def comparison_as_markdown(comparison: EvaluationComparison) -> str:
    """Format the measures as a table, the reasons, and items that only one side got right."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: EvaluationComparison) -> Iterator[str]:
    sides = escape_markdown(f"{comparison.candidate.name} compared with {comparison.base.name}")
    yield f"### {comparison.judged}: {sides}"
    yield ""
    if comparison.refused:
        yield "The two sides answered different questions:"
        yield ""
        yield from (f"- {escape_markdown(what)}" for what in comparison.refused)
        return
    yield "| task | measure | base | candidate | difference | bounds | margin | items | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for task in comparison.tasks:
        name = escape_markdown(task.name)
        if task.problem:
            yield f"| {name} | {escape_markdown(task.problem)} | | | | | | | {task.judged} |"
        for one in task.measures:
            yield (
                f"| {name} | {escape_markdown(one.name)} | {one.base:.4g} | {one.candidate:.4g} |"
                f" {one.difference:+.3g} | {one.low:+.3g} to {one.high:+.3g} | {one.margin:g} |"
                f" {one.num_items:,} | {one.judged} |"
            )
    yield ""
    yield from (f"- {escape_markdown(note)}" for note in comparison.notes)
    for task in comparison.tasks:
        measures = (f"{task.name}: {measure_in_words(measure)}" for measure in task.measures)
        yield from (f"- {escape_markdown(measure)}" for measure in measures)
    for task in comparison.tasks:
        yield from _flips(task)


def _flips(task: TaskComparison) -> Iterator[str]:
    for what, pairs in (("lost", task.lost), ("gained", task.gained)):
        if not pairs:
            continue
        yield ""
        yield f"<details><summary>{escape_markdown(task.name)}: {len(pairs)} {what}</summary>"
        yield ""
        yield from map(_flip, pairs[:_FLIPS_SHOWN])
        if (more := len(pairs) - _FLIPS_SHOWN) > 0:
            yield f"- and {more} more in comparison.json"
        yield ""
        yield "</details>"


def _flip(pair: Pair) -> str:
    base, candidate = pair
    return (
        f"- {_shown(base.question)} right: {_shown(base.target)}, base: {_shown(base.answer)},"
        f" candidate: {_shown(candidate.answer)}"
    )


def _shown(text: str) -> str:
    """Shorten text from the front, because a prompt ends with the question."""
    short = text if len(text) <= _MOST_CHARACTERS else f"…{text[-_MOST_CHARACTERS:]}"
    return markdown_code(short.replace("\n", "⏎"))
