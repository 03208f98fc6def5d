"""Paired tests of answers that are right or wrong.

Of n items two models answered, `lost` were right before and are wrong now, `gained` the reverse. The others say
nothing of which model is better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, norm


@dataclass(frozen=True, slots=True)
class PairedAnswers:
    """Items that only one of two models got right, of `num_items` that both answered.

    Of items that are alike each counts for a part of one: see `clusters`.
    """

    lost: float
    gained: float
    num_items: float

    @classmethod
    def of(cls, base: Sequence[bool], candidate: Sequence[bool]) -> "PairedAnswers":
        """Raises: ValueError for different lengths."""
        pairs = list(zip(base, candidate, strict=True))
        return cls(
            lost=sum(one and not other for one, other in pairs),
            gained=sum(other and not one for one, other in pairs),
            num_items=len(pairs),
        )

    @property
    def difference(self) -> float:
        """Accuracy of the candidate less that of the base."""
        return (self.gained - self.lost) / self.num_items

    @property
    def discordance(self) -> float:
        """The share of items that only one of the two got right."""
        return (self.gained + self.lost) / self.num_items


def p_worse(answers: PairedAnswers) -> float:
    """Probability of losing at least so many items if both are equally good; exact.

    Source: McNemar, Psychometrika 12 (1947), with the binomial distribution.
    """
    return _tail(int(answers.lost), int(answers.lost + answers.gained))


def p_not_inferior(answers: PairedAnswers, margin: float) -> float:
    """Probability of a difference at least as good if the candidate is worse by `margin`.

    Below a significance, the candidate is worse by less than the margin. The score test: the share of
    discordant items is estimated under what is tested, so that no lost item is no certainty.
    Source: Tango, Statistics in Medicine 17 (1998), 891-908.
    """
    n, lost, gained = answers.num_items, answers.lost, answers.gained
    a = 2 * n
    b = -lost - gained - (2 * n + lost - gained) * margin
    c = lost * margin * (margin + 1)
    # Of losing an item, if the difference of the accuracies is minus the margin.
    share_lost = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    variance = n * (2 * share_lost - margin * (margin + 1))
    if variance <= 0:
        return 1.0
    score = (gained - lost + n * margin) / math.sqrt(variance)
    return float(norm.sf(score))


def interval(answers: PairedAnswers, confidence: float) -> tuple[float, float]:
    """Bounds of the difference of the accuracies: those margins that the score test does not refuse.

    confidence: of both bounds together.
    """
    significance = (1 - confidence) / 2
    mirrored = PairedAnswers(answers.gained, answers.lost, answers.num_items)
    return -_largest_refused(answers, significance), _largest_refused(mirrored, significance)


# Of a bound.
_PRECISION = 1e-6


def _largest_refused(answers: PairedAnswers, significance: float) -> float:
    """The drop that is only just excluded."""
    low, high = -1.0 + _PRECISION, 1.0 - _PRECISION
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if p_not_inferior(answers, middle) < significance:
            high = middle
        else:
            low = middle
    return high


def _tail(successes: int, trials: int) -> float:
    if not trials:
        return 1.0
    return float(binomtest(successes, trials, 0.5, alternative="greater").pvalue)
