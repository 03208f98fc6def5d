"""Paired tests of answers that are right or wrong.

Only discordant items, which one of the two models got right, tell which model is better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, norm


@dataclass(frozen=True, slots=True)
class PairedAnswers:
    """Counts of discordant items. Items in clusters count as fractions."""

    lost: float
    """Items that only the base got right."""
    gained: float
    """Items that only the candidate got right."""
    num_items: float

    @classmethod
    def of(cls, base: Sequence[bool], candidate: Sequence[bool]) -> "PairedAnswers":
        """Count the answers. Raises: ValueError for different lengths."""
        pairs = list(zip(base, candidate, strict=True))
        return cls(
            lost=sum(one and not other for one, other in pairs),
            gained=sum(other and not one for one, other in pairs),
            num_items=len(pairs),
        )

    @property
    def difference(self) -> float:
        """Return the accuracy of the candidate minus the accuracy of the base."""
        return (self.gained - self.lost) / self.num_items

    @property
    def discordance(self) -> float:
        """Return the share of discordant items."""
        return (self.gained + self.lost) / self.num_items


def p_worse(answers: PairedAnswers) -> float:
    """Compute the exact probability of losing at least as many items if both models are equally good.

    Source: McNemar, Psychometrika 12 (1947), 153-157, with the binomial distribution.
    """
    trials = int(answers.lost + answers.gained)
    if not trials:
        return 1.0
    return float(binomtest(int(answers.lost), trials, 0.5, alternative="greater").pvalue)


def p_not_inferior(answers: PairedAnswers, margin: float) -> float:
    """Compute the probability of a difference at least as good if the candidate is worse by `margin`.

    A score test: it estimates the share of discordant items under the null hypothesis, so that zero lost
    items do not count as certainty.
    Source: Tango, Statistics in Medicine 17 (1998), 891-908.
    """
    n, lost, gained = answers.num_items, answers.lost, answers.gained
    a = 2 * n
    b = -lost - gained - (2 * n + lost - gained) * margin
    c = lost * margin * (margin + 1)
    # Probability of losing an item if the accuracies differ by minus the margin.
    share_lost = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    variance = n * (2 * share_lost - margin * (margin + 1))
    if variance <= 0:
        return 1.0
    score = (gained - lost + n * margin) / math.sqrt(variance)
    return float(norm.sf(score))


def interval(answers: PairedAnswers, confidence: float) -> tuple[float, float]:
    """Return bounds of the difference in accuracy, with this two-sided confidence, from the score test."""
    significance = (1 - confidence) / 2
    mirrored = PairedAnswers(answers.gained, answers.lost, answers.num_items)
    return -_smallest_excluded_drop(answers, significance), _smallest_excluded_drop(
        mirrored, significance
    )


_BOUND_PRECISION = 1e-6


def _smallest_excluded_drop(answers: PairedAnswers, significance: float) -> float:
    low, high = -1.0 + _BOUND_PRECISION, 1.0 - _BOUND_PRECISION
    while high - low > _BOUND_PRECISION:
        middle = (low + high) / 2
        if p_not_inferior(answers, middle) < significance:
            high = middle
        else:
            low = middle
    return high
