"""Whether a score is more than a guess, and whether it went down: exact tests over documents."""

import math
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest

from assay.verdicts import Diagnosis, Level, Measurement, Outcome, Unmatched, Verdict
from assay_bench.results import BenchResult

# The chance of a false alarm in one comparison of equal models; of a guess taken for a score.
SIGNIFICANCE = 0.01


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Documents that only one of two models got right, of `num_documents`.

    Where both are equally good, each of them is as likely to be lost as to be gained.
    Source: McNemar, Psychometrika 12 (1947); here with the exact binomial distribution.
    """

    lost: int
    gained: int
    num_documents: int

    @property
    def p_lower(self) -> float:
        """Probability of losing at least so many of them by chance."""
        return _tail(self.lost, self.lost + self.gained, 0.5)

    @property
    def p_higher(self) -> float:
        """Probability of gaining at least so many of them by chance."""
        return _tail(self.gained, self.lost + self.gained, 0.5)

    @property
    def resolution(self) -> float:
        """The smallest drop of the score that could have been seen: all losses, no gain."""
        return math.ceil(math.log2(1 / SIGNIFICANCE)) / self.num_documents


def judge_score(result: BenchResult) -> tuple[Verdict, list[Measurement]]:
    """Is the score more than a guess?"""
    num = len(result.right)
    p = _tail(sum(result.right), num, result.chance) if num else math.nan
    words = f"{_words(result)}, guessing gives {result.chance:.3f}"
    numbers = {result.metric: result.score, "standard_error": result.standard_error}
    diagnosis: Diagnosis | None = None
    if not num:
        level = Level(verdict=Outcome.NOT_COMPARED, reason="the task has no documents")
    elif result.num_non_finite:
        diagnosis = "non-finite"
        reason = f"{result.num_non_finite} log-likelihoods are NaN: {words}"
        level = Level(verdict=Outcome.FAIL, reason=reason, compared=num)
    elif not p < SIGNIFICANCE:
        reason = f"no better than a guess (p = {p:.2g}): {words}"
        level = Level(verdict=Outcome.FAIL, reason=reason, compared=num)
    else:
        level = Level(verdict=Outcome.PASS, compared=num)
    verdict = Verdict(
        verdict=level.verdict or Outcome.NOT_COMPARED,
        model={"name": result.model, "weights_hash": result.weights_hash},
        reference={"run": "a guess"} | _known({"score": result.chance}),
        candidate={"run": result.run, "task": result.task} | _known(numbers),
        levels={"score": level},
        notes=[words] if num else [],
        diagnosis=diagnosis,
        compared=level.compared,
    )
    return verdict, [_row(result.score, result.chance)] if num else []


def judge_change(expected: BenchResult, actual: BenchResult) -> tuple[Verdict, list[Measurement]]:
    """Did the score go down? Both answered the same documents, so each is its own control."""
    rows: list[Measurement] = []
    notes = [f"expected: {_words(expected)}", f"actual: {_words(actual)}"]
    if (expected.task_hash, expected.metric) != (actual.task_hash, actual.metric):
        reason = "the two were not asked the same: task or documents differ"
        level = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    elif not expected.right:
        level = Level(verdict=Outcome.NOT_COMPARED, reason="the task has no documents")
    elif expected.num_non_finite and not actual.num_non_finite:
        reason = f"{expected.num_non_finite} log-likelihoods of the expected side are NaN"
        level = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    else:
        test = paired_test(expected.right, actual.right)
        rows = [_row(actual.score, expected.score)]
        reason = (
            f"{test.lost} documents lost and {test.gained} gained of {test.num_documents}"
            f" (p = {test.p_lower:.2g} for lower, {test.p_higher:.2g} for higher)"
        )
        notes += [reason, f"a drop of less than {test.resolution:.3f} could not have been seen"]
        lower = test.p_lower < SIGNIFICANCE or actual.num_non_finite > 0
        outcome = Outcome.FAIL if lower else Outcome.PASS
        level = Level(verdict=outcome, reason=reason, compared=test.num_documents)
    verdict = Verdict(
        verdict=level.verdict or Outcome.NOT_COMPARED,
        model={"name": actual.model, "weights_hash": actual.weights_hash},
        reference={"run": expected.name} | _known({expected.metric: expected.score}),
        candidate={"run": actual.run} | _known({actual.metric: actual.score}),
        levels={"score": level},
        notes=notes,
        diagnosis="non-finite" if actual.num_non_finite else None,
        compared=level.compared,
        unmatched=Unmatched(expected=[] if level.compared else [expected.task]),
    )
    return verdict, rows


def paired_test(expected: list[bool], actual: list[bool]) -> PairedTest:
    """The documents that only one side got right. Raises: ValueError for different lengths."""
    pairs = list(zip(expected, actual, strict=True))
    return PairedTest(
        lost=sum(one and not other for one, other in pairs),
        gained=sum(other and not one for one, other in pairs),
        num_documents=len(pairs),
    )


def _tail(successes: int, trials: int, probability: float) -> float:
    if not trials:
        return 1.0
    return float(binomtest(successes, trials, probability, alternative="greater").pvalue)


def _words(result: BenchResult) -> str:
    return (
        f"{result.name}: {result.metric} {result.score:.3f} ± {result.standard_error:.3f}"
        f" on {len(result.right)} documents of {result.task}"
    )


def _known(numbers: dict[str, float]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def _row(actual: float, expected: float) -> Measurement:
    ratio = actual / expected if expected else math.inf
    return Measurement(
        level="score", module="", port="score", statistic="score",
        actual=actual, expected=expected, ratio=ratio,
    )  # fmt: skip
