"""Verdict of a single evaluation: finite numbers, and choices that are better than a guess."""

from functools import cache

from scipy.stats import binom, binomtest

from assay.comparing.levels import (
    Cause,
    LevelResult,
    conclude,
    failed,
    not_compared,
    not_run,
    outcome_of_levels,
    passed,
)
from assay.verdicts import Outcome, Verdict
from assay_bench.evaluations.items import Evaluation, TaskResult

# Chance that a guess passes.
SIGNIFICANCE = 0.01
# Tasks with too few items to detect this advantage over a guess, with this power, do not fail.
_ADVANTAGE, _POWER = 0.2, 0.8


def judge_scores(evaluation: Evaluation) -> Verdict:
    """Judge each task. Only `assay bench compare` judges how good a score is."""
    levels = {name: _level(task) for name, task in evaluation.tasks.items()}
    tasks = evaluation.tasks.values()
    is_finite = all(item.is_finite for task in tasks for item in task.items) and not any(
        task.num_nan_calls for task in tasks
    )
    return conclude(
        levels,
        None if is_finite else Cause("non-finite"),
        notes=[f"{name}: {score_in_words(task)}" for name, task in evaluation.tasks.items()],
        headline=_headline(levels),
        model={"name": evaluation.facts.get("model", evaluation.name)}
        | {key: evaluation.facts[key] for key in ("weights_hash",) if key in evaluation.facts},
        reference={"run": "a guess"},
        candidate={"run": evaluation.facts.get("run", evaluation.name)},
        compared_unit="items",
    )


def _headline(results: dict[str, LevelResult]) -> str:
    levels = {name: one.level for name, one in results.items()}
    outcome = outcome_of_levels(levels)
    if outcome is Outcome.PASS:
        judged = sum(level.verdict is not None for level in levels.values())
        return f"{judged} tasks ran; every choice is better than a guess."
    names = [n for n, one in levels.items() if (one.verdict or Outcome.NOT_COMPARED) is outcome]
    problem = "failed" if outcome is Outcome.FAIL else "not compared"
    return f"{', '.join(names) or 'no task'}: {problem}."


def score_in_words(task: TaskResult) -> str:
    """Describe accuracy, the accuracy of a guess, and the log-probability of right answers."""
    parts = []
    if task.accuracy is not None:
        guess = "" if task.chance is None else f" (a guess: {task.chance:.1%})"
        parts.append(f"{task.metric} {task.accuracy:.1%}{guess}")
    if task.log_probability is not None:
        parts.append(f"{task.log_probability:.3f} nats per byte")
    return f"{', '.join(parts) or 'no score'}, {len(task.items):,} items"


def _level(task: TaskResult) -> LevelResult:
    num_items = len(task.items)
    if wrong := sum(not item.is_finite for item in task.items):
        reason = f"{wrong} of {num_items} log-probabilities are NaN or infinite"
        return failed(num_items, reason)
    if task.num_nan_calls:
        return failed(num_items, task.nan_calls_in_words)
    if task.accuracy == 0 and task.log_probability is None:
        reason = f"no answer is right, which shows nothing: {score_in_words(task)}"
        return not_run(reason)
    if task.chance is not None and task.chance < 1 and task.accuracy is not None:
        right = sum(item.right is True for item in task.items)
        p = float(binomtest(right, num_items, task.chance, alternative="greater").pvalue)
        if not p < SIGNIFICANCE:
            needed = items_to_tell_from_guess(task.chance)
            if num_items < needed:
                reason = f"too few items to tell it from a guess ({num_items} of {needed}): {score_in_words(task)}"
                return not_compared(reason)
            reason = f"no better than a guess (p = {p:.2g}): {score_in_words(task)}"
            return failed(num_items, reason)
    return passed(num_items)


@cache
def items_to_tell_from_guess(chance: float) -> int:
    """Return how many items tell a model that is 20 points better than `chance` from a guess.

    This is the first number with a power of 0.8. The power of the exact test has steps: a larger number
    can have slightly less.
    """
    better = min(chance + _ADVANTAGE, (1 + chance) / 2)
    count = 1
    while True:
        # A guess reaches this many right answers with a probability below SIGNIFICANCE.
        threshold = int(binom.isf(SIGNIFICANCE, count, chance)) + 1
        if binom.sf(threshold - 1, count, better) >= _POWER:
            return count
        count += 1
