"""Explanations of a difference by one change."""

import math

import pytest

from assay_expectations.judging.numbers import describe_likeness, judge_numbers
from assay_expectations.records import Distributions, Observed
from packages.expectations.tests.unit.sample_expectations import (
    NOISE,
    YARDSTICK,
    distributions,
    expectation,
    observed,
    off,
)

FALLING = [YARDSTICK[1], YARDSTICK[0]]


def describe(seen: Observed) -> str | None:
    expected = expectation(len(seen.most_likely[0][0]))
    judged = judge_numbers(expected.signature, seen.distributions, "bfloat16", expected.limits)
    return describe_likeness(expected.signature, seen, "bfloat16", judged)


def test_one_wrong_token_has_no_common_explanation() -> None:
    # The pooled error of ten tokens is within the limit, although kept ids of one are wrong.
    tokens = [off(NOISE)] * 9 + [off(5 * NOISE)]
    assert describe(observed(distributions(*tokens))) is None


def wrong_elsewhere() -> Distributions:
    return expectation().signature.captured.model_copy(update={"projections": [[[[5.0]]]]})


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (observed(distributions(FALLING)), "the logits are negated"),
        (
            observed(distributions([-0.5, -3.5])),
            "the logits are 1.5 times the expected logits",
        ),
        (
            # Other ids have taken the places of the kept ids.
            observed(distributions([-9.0, -3.0], [-1.0, -8.0], rest=-0.4), most_likely=YARDSTICK),
            "the probabilities are right but belong to other ids: the vocabulary is permuted",
        ),
        (
            observed(wrong_elsewhere()),
            (
                "the 2 most likely ids of each token agree; the error is in the rest of the"
                " vocabulary"
            ),
        ),
        (
            observed(distributions(off(NOISE)), dtype="float32"),
            "the model's parameters are float32, expected bfloat16",
        ),
        (
            observed(distributions([math.nan, -3.0])),
            "the log-probabilities of 1 of 1 tokens are not finite",
        ),
    ],
)
def test_a_change_of_all_logits_is_named(seen: Observed, message: str) -> None:
    assert describe(seen) == message
