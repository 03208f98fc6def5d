"""Verdict of a single evaluation: finite numbers, and choices that are better than a guess."""

from functools import cache

from scipy.stats import binom, binomtest

from assay.verdicts import Level, Outcome, Unmatched, Verdict, overall_outcome
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
    outcome = overall_outcome([level.verdict for level in levels.values() if level.verdict])
    return Verdict(
        verdict=outcome,
        headline=_headline(outcome, levels),
        model={"name": evaluation.facts.get("model", evaluation.name)}
        | {key: evaluation.facts[key] for key in ("weights_hash",) if key in evaluation.facts},
        reference={"run": "a guess"},
        candidate={"run": evaluation.facts.get("run", evaluation.name)},
        levels=levels,
        notes=[f"{name}: {score_in_words(task)}" for name, task in evaluation.tasks.items()],
        diagnosis=None if is_finite else "non-finite",
        compared=sum(level.compared for level in levels.values()),
        compared_unit="items",
        unmatched=Unmatched(),
    )


def _headline(outcome: Outcome, levels: dict[str, Level]) -> str:
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


def _level(task: TaskResult) -> Level:
    num_items = len(task.items)
    if wrong := sum(not item.is_finite for item in task.items):
        reason = f"{wrong} of {num_items} log-probabilities are NaN or infinite"
        return Level(verdict=Outcome.FAIL, reason=reason, compared=num_items)
    if task.num_nan_calls:
        return Level(verdict=Outcome.FAIL, reason=task.nan_calls_in_words, compared=num_items)
    if task.accuracy == 0 and task.log_probability is None:
        reason = f"no answer is right, which shows nothing: {score_in_words(task)}"
        return Level(verdict=None, reason=reason)
    if task.chance is not None and task.chance < 1 and task.accuracy is not None:
        right = sum(item.right is True for item in task.items)
        p = float(binomtest(right, num_items, task.chance, alternative="greater").pvalue)
        if not p < SIGNIFICANCE:
            needed = items_to_tell_from_guess(task.chance)
            if num_items < needed:
                reason = f"too few items to tell it from a guess ({num_items} of {needed}): {score_in_words(task)}"
                return Level(verdict=Outcome.NOT_COMPARED, reason=reason)
            reason = f"no better than a guess (p = {p:.2g}): {score_in_words(task)}"
            return Level(verdict=Outcome.FAIL, reason=reason, compared=num_items)
    return Level(verdict=Outcome.PASS, compared=num_items)


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
