"""Compressed output distributions of a model for every generated token.

A model that does not generate has distributions at some positions of its inputs instead.
Shapes, by batch: B rows, N tokens (can differ between rows), K kept ids, M projections.
"""

from assay.verdicts import Number
from assay_expectations.records.keys import PublishedRecord

# Of one batch, (B, N, K + 1). The last value of a token covers all other ids together.
LogProbabilities = list[list[list[Number]]]

# Of one batch, (B, N, M).
Projections = list[list[list[Number]]]


class Distributions(PublishedRecord):
    """Distributions over the vocabulary for each generated token of one run, by batch."""

    log_probabilities: list[LogProbabilities]
    """Of the kept ids, and of all others together."""
    projections: list[Projections]
    """Of all log-probabilities. They detect errors outside of the kept ids and in their order."""


class Signature(PublishedRecord):
    """Distributions of the yardstick and of the captured run."""

    tokens: list[list[list[int]]]
    """Tokens that the yardstick chose and that every run is forced to follow.

    (B, N) by batch; (B, 0) for a model that does not generate.
    """
    top_ids: list[list[list[list[int]]]]
    """Kept ids: the yardstick's most likely ids in their order, (B, N, K) by batch."""
    spreads: list[list[list[Number]]]
    """Standard deviation of the yardstick's log-probabilities over the vocabulary, (B, N) by batch."""
    yardstick: Distributions
    """In the highest precision."""
    captured: Distributions
    """Its distance from the yardstick is the noise."""


class Observed(PublishedRecord):
    """Distributions of a run that is judged by a signature."""

    distributions: Distributions
    most_likely: list[LogProbabilities]
    """Log-probabilities of this run's own most likely ids, in their order, by batch."""
    dtype: str
    """The dtype of most parameters."""
