"""The right option of samples whose targets can be read in several ways."""

from collections.abc import Sequence
from typing import Any

import pytest

from assay_bench.evaluations.choices import num_right, right_options

DIGITS = [" 4", " 0", " 3", " 1"]


def found(
    targets: Sequence[str], rights: Sequence[float], options: Sequence[str], **update: Any
) -> list[int | None] | None:
    """Read samples; the model always prefers the first option."""
    samples = [
        {"target": target, "acc": right} | update
        for target, right in zip(targets, rights, strict=True)
    ]
    likelihoods = [[-1.0] + [-2.0] * (len(options) - 1) for _ in samples]
    return right_options(samples, [options] * len(samples), likelihoods)


@pytest.mark.parametrize(
    ("rights", "expected"),
    [
        ([1.0, 0.0], [0, 1]),  # texts: "4" is the first option
        ([0.0, 1.0], [None, 0]),  # indices: 4 is none
        ([1.0, 1.0], None),
    ],
)
def test_reading_of_numerals_explains_what_was_right(
    rights: list[float], expected: list[int | None] | None
) -> None:
    assert found(["4", "0"], rights, DIGITS) == expected


def test_readings_that_explain_all_samples_alike_do_not_decide() -> None:
    # The model is wrong about both: 1 is the second option or the last.
    assert found(["1", "1"], [0.0, 0.0], DIGITS) is None
    assert found(["1", "1"], [0.0, 0.0], DIGITS, mcc=[3, 0]) == [3, 3]


def test_right_one_of_two_contexts_follows_from_the_score() -> None:
    same = [" was here"] * 2
    assert found(["was here"] * 2, [1.0, 0.0], same) == [0, 1]
    # Of three contexts, another one is right.
    assert found(["was here"] * 2, [1.0, 0.0], [" was here"] * 3) is None


@pytest.mark.parametrize(("target", "expected"), [("1", 1), ("[0, 2]", 2), ("[x", 1), ("[]", 1)])
def test_number_of_right_options_is_that_of_a_list(target: str, expected: int) -> None:
    assert num_right({"target": target}) == expected
