"""What a model gives for every token that it generates, in few numbers.

Of a model that does not generate it is what it gives at some positions of its inputs.
Shapes, by batch: B rows, N tokens (of each row as many as it has), K kept ids, M projections.
"""

from assay.verdicts import Number, Record

# Of one batch, (B, N, K + 1): the last of a token is that of all ids together that are not kept.
LogProbabilities = list[list[list[Number]]]

# Of one batch, (B, N, M).
Projections = list[list[list[Number]]]


class Distributions(Record):
    """The distribution over the vocabulary for each generated token, of one run.

    log_probabilities: by batch, of the ids that are kept and of all others together.
    projections: by batch, of the log-probabilities of the whole vocabulary: what is wrong outside of
        the kept ids, or in their order, changes these.
    """

    log_probabilities: list[LogProbabilities]
    projections: list[Projections]


class Signature(Record):
    """What the model gives, in the yardstick and as it was captured.

    tokens: what the yardstick chose, and what every run is forced to follow, (B, N) by batch; (B, 0)
        for a model that does not generate.
    top_ids: its most likely ids in their order, (B, N, K) by batch: these are kept.
    spreads: standard deviation of its log-probabilities over the vocabulary, (B, N) by batch.
    yardstick: in the highest precision; captured: its distance from the yardstick is the noise.
    """

    tokens: list[list[list[int]]]
    top_ids: list[list[list[list[int]]]]
    spreads: list[list[list[Number]]]
    yardstick: Distributions
    captured: Distributions


class Observed(Record):
    """What a run gives that is held to a signature.

    most_likely: by batch, the log-probabilities of its own most likely ids, in their order.
    dtype: that most parameters had.
    """

    distributions: Distributions
    most_likely: list[LogProbabilities]
    dtype: str
