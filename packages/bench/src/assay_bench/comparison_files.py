"""The files that `assay bench compare` writes: verdict and questions; and baselines, with who accepted them."""

import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from assay.errors import UsageError, name_some
from assay.files import DiskError, open_file, read_bytes, read_sealed, seal, write_whole
from assay.foreign_text import escape_markdown, markdown_code
from assay.judge.levels import Cause, LevelResult, conclude, not_run
from assay.judge.wording import format_count
from assay.runs import provenance
from assay.runs.results import write_results
from assay.verdicts import Level, NextStep, Outcome, Record, Unmatched, Verdict
from assay_bench.comparing import (
    EvaluationComparison,
    Measure,
    Pair,
    TaskComparison,
    Terms,
    chosen_metrics,
    compare,
)
from assay_bench.lm_eval_files import read_evaluation
from assay_bench.results import (
    PERPLEXITY,
    TOO_FEW_ITEMS,
    UNDERPOWERED,
    Evaluation,
    TaskResult,
    judge_scores,
    measurement,
    merge_texts,
    plain_name,
    undecided_levels,
)

SCHEMA = 1

# The kind of a file stands in its first bytes.
_NUM_KIND_BYTES = 64
# About 70,000 items, which take a few seconds to read; four times as many as the suite `core` has.
_MAX_BASELINE_BYTES = 16 << 20


class Acceptance(Record):
    """Who accepted an evaluation, when and why."""

    by: str | None
    date: str
    reason: str | None
    command: list[str]


class Baseline(Record):
    """The content of a baseline file."""

    baseline: int = Field(default=SCHEMA, ge=SCHEMA, le=SCHEMA)
    name: str
    acceptance: Acceptance
    facts: dict[str, Any]
    asked: dict[str, Any]
    tasks: dict[str, TaskResult] = Field(min_length=1)
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, evaluation: Evaluation, acceptance: Acceptance) -> Self:
        """Make a baseline of an evaluation."""
        kept = {
            one: getattr(evaluation, one) for one in cls.model_fields if hasattr(evaluation, one)
        }
        return cls(acceptance=acceptance, **kept)

    def evaluation(self) -> Evaluation:
        """Return the evaluation that was accepted."""
        tasks = {name: replace(task, name=name) for name, task in self.tasks.items()}
        return Evaluation(self.name, tasks, self.asked, self.facts, self.groups, (), self.settings)


def _read_baseline(path: Path) -> Evaluation:
    read_bytes(path, _MAX_BASELINE_BYTES)
    return read_sealed(Baseline, path).evaluation()


def is_baseline(path: Path) -> bool:
    """Return True if the file declares itself a baseline."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return b'"baseline"' in file.read(_NUM_KIND_BYTES)


def accept(
    evaluation: Evaluation, path: Path, terms: Terms, *, by: str | None, reason: str | None
) -> Path:
    """Write or replace the baseline file `path`, and create its folder. Return the file.

    Raises: UsageError if the numbers are not finite or no better than a guess; and, without a reason, if
        the evaluation is worse than the one it replaces, or better by more than the margins, which
        suggests that the training data contains the questions.
    """
    scores = judge_scores(evaluation, chosen_metrics(evaluation, terms.metrics))
    problems = [
        f"{name}: {level.reason}"
        for name, level in scores.levels.items()
        if level.verdict in (Outcome.FAIL, Outcome.NOT_COMPARED)
    ]
    if problems:
        raise UsageError(f"this evaluation cannot be a baseline: {'; '.join(problems)}")
    if reason is None and path.is_file():
        _refuse_surprises(_read_baseline(path), evaluation, path, terms)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError.refused(path.parent, error) from error
    run = provenance()
    acceptance = Acceptance(by=by, date=run["date"], reason=reason, command=run["command"])
    baseline = Baseline.of(evaluation, acceptance)
    text = seal(json.loads(baseline.model_dump_json()))
    if len(text) > _MAX_BASELINE_BYTES:
        raise UsageError(
            f"this evaluation is too large for a baseline: {len(text) >> 20} MiB of at most"
            f" {_MAX_BASELINE_BYTES >> 20} MiB; evaluate fewer tasks"
        )
    return write_whole(path, text)


def _refuse_surprises(before: Evaluation, now: Evaluation, path: Path, terms: Terms) -> None:
    worse = compare(before, now, terms)
    if worse.judged is not Outcome.PASS:
        failing = [
            f"{part.name}: {part.problem or (TOO_FEW_ITEMS if part.judged is Outcome.NOT_COMPARED else part.judged)}"
            for part in worse.parts
            if part.judged is not Outcome.PASS
        ]
        raise UsageError(
            f"{path} exists, and the new evaluation is not shown to be as good"
            f" ({'; '.join(failing)}). Nothing was written. To replace it anyway: --reason TEXT"
        )
    surprising = ", ".join(
        f"{task.name} {measure.name} improved by {abs(measure.difference):.3g}"
        for task in compare(now, before, terms).parts  # the older evaluation is the worse one
        for measure in task.measures
        if abs(measure.difference) > measure.margin and measure.p_worse < terms.significance
    )
    if surprising:
        raise UsageError(
            f"{path} exists, and the new evaluation is suspiciously good: {surprising}. Did the training"
            " data contain the questions? To replace it anyway: --reason TEXT"
        )


MARKDOWN_FILE = "comparison.md"

_MOST_CHARACTERS = 120
_LEAST_DECIMALS, _MOST_DECIMALS = 4, 8


def read_sides(
    base: Path,
    candidate: Path,
    clusters: Mapping[str, str],
    suite_clusters: Mapping[str, str] | None = None,
) -> tuple[Evaluation, Evaluation]:
    """Read two folders or baselines, and give them different names.

    clusters: the document field of a task that names the cluster.
    suite_clusters: the same, of a suite: also of tasks that the sides lack. Baselines keep their own.
    Raises: UsageError for clusters of an unknown task or document field, or if the base is a baseline.
    """
    if clusters and is_baseline(base):
        raise UsageError(f"--cluster: {base} is a baseline, which has the clusters of its run")
    fields = {**(suite_clusters or {}), **clusters}
    sides = (
        (_read_baseline(path) if is_baseline(path) else read_evaluation(path, fields), path)
        for path in (base, candidate)
    )
    was, now = _named_apart(*sides)
    tasks = list(dict.fromkeys(map(plain_name, was.tasks)))
    if unknown := next((name for name in clusters if name not in tasks), None):
        raise UsageError(
            f"--cluster {unknown}: {was.name} has no such task, only {', '.join(tasks)}"
        )
    return was, now


def write_comparison(
    was: Evaluation, now: Evaluation, terms: Terms, folder: Path, notes: Sequence[str] = ()
) -> EvaluationComparison:
    """Compare two evaluations and write verdict, JSON and Markdown, with these notes first."""
    found = compare(was, now, terms)
    cached = _CACHED if "use_cache" in {**was.settings, **now.settings} else ""
    same = [_SAME + cached] if was.tasks == now.tasks else []
    found = replace(found, notes=(*same, *notes, *found.notes))
    write_whole(folder / MARKDOWN_FILE, comparison_as_markdown(found))
    verdict = verdict_of(found)
    if any(map(_failed, found.parts)):
        what = "items with the largest losses"
        if any(task.lost for task in found.tasks):
            what = "questions that only the base got right"
        read = NextStep(f"read the {what}: {folder / MARKDOWN_FILE}")
        verdict = verdict.model_copy(update={"next_steps": [read, *verdict.next_steps]})
    rows = [
        measurement(part.name, "task", one.name, actual=one.candidate, expected=one.base)
        for part in found.parts
        for one in part.measures
    ]
    write_results(verdict, rows, folder)
    return found


_SAME = "BASE and CANDIDATE hold equal samples: one run compared with itself, or two that agree in every bit"
_CACHED = ", or one that a response cache answered (--use_cache of lm-eval was set)"


def _named_apart(*sides: tuple[Evaluation, Path]) -> Iterator[Evaluation]:
    """Add the setup function to the name of each side, and its file or folder if the names are still equal."""
    setups = [one.facts.get("setup") for one, _ in sides]
    marks = [f" with {Path(str(setup)).name}" if setup else "" for setup in setups]
    names = {one.name + mark for (one, _), mark in zip(sides, marks, strict=True)}
    places = [path.resolve() for _, path in sides]
    if len(names) == 1 and len(set(places)) > 1:
        is_short = len({place.name for place in places}) > 1
        added = [place.name if is_short else place for place in places]
        marks = [f"{mark} ({place})" for mark, place in zip(marks, added, strict=True)]
    for (one, _), mark in zip(sides, marks, strict=True):
        run = {"run": f"{one.facts['run']}{mark}"} if "run" in one.facts else {}
        yield replace(one, name=one.name + mark, facts=one.facts | run)


def verdict_of(comparison: EvaluationComparison) -> Verdict:
    """Return the verdict, with a level for each task and pool."""
    base, candidate = comparison.base, comparison.candidate
    levels = {one.name: _level_of(comparison, one) for one in comparison.parts}
    levels |= {
        name: not_run(reason, compared=len(base.tasks[name].items))
        for name, reason in comparison.unjudged.items()
    }
    wrong = any(task.is_non_finite for task in comparison.tasks)
    return conclude(
        levels,
        Cause("non-finite") if wrong else None,
        model={"name": candidate.facts.get("model", candidate.name)},
        reference=base.side | {"run": base.name},
        candidate=candidate.side,
        notes=[
            *comparison.notes,
            *_measures_in_words(comparison),
            *_pooled_in_words(comparison.tasks),
        ],
        compared=_num_compared(comparison, base.tasks),
        compared_unit="items",
        headline=_headline(comparison, levels),
        next_steps=_next_steps(comparison),
        # A task that only the base has is a level with its reason.
        unmatched=Unmatched(actual=[one for one in candidate.tasks if one not in base.tasks]),
    )


def _next_steps(comparison: EvaluationComparison) -> list[NextStep]:
    """Return what to do about the problems, each once, after the tasks that have it."""
    steps = []
    for task in comparison.tasks:
        lacking = [one for one in _undecided(task) if one.items_needed]
        has_too_few = any(not _limit_of(task, one, comparison) for one in lacking)
        if task.next_step:
            steps.append((task.name, task.next_step))
        if has_too_few:
            steps.append((task.name, _TOO_FEW_DOCUMENTS))
    return list(map(NextStep, merge_texts(steps)))


_TOO_FEW_DOCUMENTS = "add documents or widen the margin: the task has fewer than needed"


def _undecided(part: TaskComparison) -> list[Measure]:
    """Return the measures that are underpowered, and that no pool decides."""
    return [m for m in part.measures if m.judged is Outcome.NOT_COMPARED and m.pool is None]


def _failed(part: TaskComparison) -> list[Measure]:
    return [one for one in part.measures if one.judged is Outcome.FAIL]


def _headline(comparison: EvaluationComparison, levels: Mapping[str, LevelResult]) -> str | None:
    if undecided_levels(levels):
        limit = sufficient_limit(comparison)
        return f"{TOO_FEW_ITEMS}{f': run both sides with --limit {limit}' if limit else ''}."
    if comparison.judged is Outcome.FAIL:
        worse = [part.name for part in comparison.parts if _failed(part)]
        return f"Worse by more than chance: {name_some(worse)}." if worse else None
    if comparison.judged is Outcome.NOT_COMPARED:
        names = [name for name, one in levels.items() if one.level.verdict is comparison.judged]
        return f"Not compared: {name_some(names)}." if names else None
    used = (measure.source for task in comparison.tasks for measure in task.measures)
    sources = " and ".join(dict.fromkeys(filter(None, used)))
    worse = [
        f"{part.name} {one.name}"
        for part in comparison.parts
        for one in part.measures
        if one.judged is Outcome.PASS and one.is_worse
    ]
    return (
        f"Not worse by the margin{f' of {sources}' if sources else ''}: {_num_compared(comparison, comparison.base.tasks):,} items exclude such a"
        f" difference (error rate {comparison.terms.significance:.0%} per measure)."
        + (f" Worse by more than chance, within the margin: {name_some(worse)}." if worse else "")
    )


def sufficient_limit(comparison: EvaluationComparison) -> int | None:
    """Return the --limit with which an equally good candidate passes in all measures; None if none is known."""
    limits = [
        _limit_of(part, measure, comparison)
        for part in comparison.parts
        for measure in _undecided(part)
    ]
    return max(limits, default=0) if all(limits) else None


def _limit_of(part: TaskComparison, measure: Measure, comparison: EvaluationComparison) -> int:
    """Return the --limit that gives a measure, of a task or a pool, the items that it needs; 0 if none is known."""
    needed, names = measure.items_needed or 0, part.members or (part.name,)
    documents = [
        comparison.base.tasks[task.name].num_documents or needed
        for task in comparison.tasks
        if task.name in names and any(one.name == measure.name for one in task.measures)
    ]

    def num_items(limit: int) -> int:
        return sum(min(limit, size) for size in documents)

    return bisect_left(range(needed), needed, key=num_items) if num_items(needed) >= needed else 0


def measure_in_words(measure: Measure) -> str:
    """Describe both values, the difference with its bounds, and the conclusion."""
    points = " points" if measure.kind == "yes-no" else ""
    values = (
        f"{_name_in_words(measure)} {_number(measure, measure.base)} -> {_number(measure, measure.candidate)},"
        f" {_number(measure, measure.difference, '+')}{points} ({measure.confidence:.0%} interval"
        f" {_number(measure, measure.low, '+')} to {_number(measure, measure.high, '+')}): "
    )
    digits = f"{measure.margin * (100 if points else 1):.{_MOST_DECIMALS}f}"
    margin = f"{digits.rstrip('0').removesuffix('.')}{points}"
    worse, better = ("lower", "higher") if measure.higher_is_better else ("higher", "lower")
    drop = "drop" if measure.higher_is_better else "rise"
    significant = f"{worse} by more than chance (p = {measure.p_worse:.2g})"
    if measure.judged is Outcome.FAIL:
        return f"{values}{significant}"
    if _is_suspicious(measure):
        return (
            f"{values}{better} by more than {margin}: did the training data contain the questions?"
        )
    items = _items_in_words(measure)
    if measure.judged is Outcome.PASS:
        by = f" by {items}" if measure.num_clusters else ""
        but = f"{significant}, but " if measure.is_worse else ""
        return f"{values}{but}a {drop} of {margin} is excluded{by}"
    instead = f", but {measure.pool} can" if measure.pool else ""
    return (
        f"{values}{items} cannot exclude a {drop} of {margin}{instead}{_needed_in_words(measure)}"
    )


def _is_suspicious(measure: Measure) -> bool:
    """Return True if the candidate is better by more than the margin."""
    least_gain = measure.low if measure.higher_is_better else -measure.high
    return measure.judged is Outcome.PASS and least_gain > measure.margin


def _name_in_words(measure: Measure) -> str:
    """Add the unit to a measure that is not named for what its numbers are."""
    if measure.kind != "nats per byte":
        return measure.name
    # A perplexity is e to the power of minus this number, times a number of bytes.
    name = "log-likelihood" if measure.name == PERPLEXITY else measure.name
    return f"{name} (nats per byte)"


def _items_in_words(measure: Measure) -> str:
    clusters = f" in {measure.num_clusters:,} clusters" if measure.num_clusters else ""
    return f"{measure.num_items:,} items{clusters}"


def _needed_in_words(measure: Measure) -> str:
    needed, available = measure.items_needed, measure.num_documents
    if needed is None:
        return ", though they usually would if the candidate is as good"
    if available is not None and needed > available:
        return f", about {needed:,} distinct documents would, but the task has {available:,}"
    return f", about {needed:,} would"


def _level_of(comparison: EvaluationComparison, task: TaskComparison) -> LevelResult:
    undecided = sorted(_undecided(task), key=lambda one: -(one.items_needed or 0))
    reasons = [task.problem] if task.problem else []
    reasons += map(measure_in_words, _failed(task))
    if undecided and not _failed(task):
        first, *others = undecided
        also = f" (also undecided: {name_some([one.name for one in others])})" if others else ""
        reasons.append(f"{UNDERPOWERED}: {measure_in_words(first)}{also}")
    level = Level(
        verdict=task.judged,
        reason="; ".join(reasons) or None,
        compared=_num_compared(comparison, task.members or [task.name]),
        measures=[_cells(one) for one in task.measures],
    )
    return LevelResult(level)


def _measures_in_words(comparison: EvaluationComparison) -> Iterator[str]:
    """Describe the measures that pass. A pool stands for its tasks, unless they are unusual."""
    pooled = {
        (name, one.name)
        for pool in comparison.pools
        for name in pool.members
        for one in pool.measures
    }
    for part in comparison.parts:
        for one in part.measures:
            is_unusual = one.is_worse or _is_suspicious(one)
            if one.judged is Outcome.PASS and (is_unusual or (part.name, one.name) not in pooled):
                yield f"{part.name}: {measure_in_words(one)}"


def _pooled_in_words(tasks: Sequence[TaskComparison]) -> Iterator[str]:
    """Describe the tasks that pass only by each pool."""
    pools = Counter(
        pool for task in tasks for pool in sorted({one.pool for one in task.measures if one.pool})
    )
    for pool, num in pools.items():
        yield f"{format_count(num, 'task')} too small to decide alone: the pool of {pool} decides"


def _num_compared(comparison: EvaluationComparison, names: Collection[str]) -> int:
    """Count the items of tasks. The filters of one task have the same items."""
    found = {
        plain_name(task.name): max((measure.num_items for measure in task.measures), default=0)
        for task in comparison.tasks
        if task.name in names
    }
    return sum(found.values())


def _number(measure: Measure, value: float, sign: str = "") -> str:
    """Format a number of a measure so that its bounds are on the right side of the margin.

    Shares are in percent, and in points with a sign; they have at least one decimal. Other numbers have enough to show
    the difference.
    """
    gaps = [abs(bound) - measure.margin for bound in (measure.low, measure.high)]
    if measure.kind == "yes-no":
        decimals = _decimals([100 * gap for gap in gaps], 1)
        return f"{100 * value:{sign}.{decimals}f}{'' if sign else '%'}"
    shown = [one / 10 for one in (measure.difference, measure.margin, *gaps)]
    return f"{value:{sign}.{_decimals(shown, _LEAST_DECIMALS)}f}"


def _decimals(values: Sequence[float], least: int) -> int:
    """Return how many decimals show a digit of each value that is not zero."""
    smallest = min((abs(one) for one in values if one), default=1.0)
    return min(max(-math.floor(math.log10(smallest)), least), _MOST_DECIMALS)


def comparison_as_markdown(comparison: EvaluationComparison) -> str:
    """Format the items that only one side got right, and the largest losses. The verdict holds the measures."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: EvaluationComparison) -> Iterator[str]:
    sides = escape_markdown(f"{comparison.candidate.name} compared with {comparison.base.name}")
    yield f"### {comparison.judged}: {sides}"
    for task in comparison.tasks:
        for what, pairs in (("lost", task.lost), ("gained", task.gained)):
            if pairs:
                yield from ("", f"#### {escape_markdown(task.name)}: {len(pairs)} {what}", "")
                yield from map(_item_line, pairs)
    has_lost = any(task.lost for task in comparison.tasks)
    for part in comparison.parts:
        for one in _failed(part):
            if one.kind != "yes-no" or not has_lost:
                name = escape_markdown(one.name)
                yield ""
                yield f"#### {escape_markdown(part.name)}: {len(one.losses)} largest losses of {name}"
                yield ""
                for loss in one.losses:
                    change = f"{loss.base:.4g} -> {loss.candidate:.4g}"
                    yield f"{_item_line(loss.pair)}, {name}: {change}"


def _cells(measure: Measure) -> dict[str, str | float | None]:
    """Return the numbers of a measure in verdict.json, which are a line of the report."""
    return {
        "measure": _name_in_words(measure),
        "base": measure.base,
        "candidate": measure.candidate,
        "difference": measure.difference,
        "low": measure.low,
        "high": measure.high,
        "confidence": measure.confidence,
        "margin": measure.margin,
        "margin_source": measure.source,
        "p": measure.p_worse,
        "items": measure.num_items,
        "clusters": measure.num_clusters,
        "items_needed": measure.items_needed,
        "verdict": measure.judged.value,
    }


def _item_line(pair: Pair) -> str:
    base, candidate = pair
    question, target = candidate.question or base.question, candidate.target or base.target
    texts = {"": question, "right: ": target}
    for side, one in (("base: ", base), ("candidate: ", candidate)):
        # A baseline has no texts.
        texts[side] = one.answer or (one.question and _EMPTY)
    shown = [f"{name}{_shown(text)}" for name, text in texts.items() if text]
    return f"- {', '.join(shown) or _shown(base.key)}"


_EMPTY = "(empty)"
_SPACES = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def _shown(text: str) -> str:
    """Shorten text from the front, because a prompt ends with the question."""
    short = text if len(text) <= _MOST_CHARACTERS else f"…{text[-_MOST_CHARACTERS:]}"
    return markdown_code(re.sub(r"^ +| +$|\s{2,}|[\n\t]", _show_spaces, short))


def _show_spaces(found: re.Match[str]) -> str:
    return "".join(_SPACES.get(letter, letter) for letter in found[0])
