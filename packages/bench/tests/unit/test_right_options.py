"""Right options of documents whose targets can be read in several ways."""

from collections.abc import Sequence
from typing import Any

import pytest

from assay_bench.right_options import Choice, right_options

DIGITS = [" 4", " 0", " 3", " 1"]


def found(
    targets: Sequence[str], rights: Sequence[float], options: Sequence[str], **update: Any
) -> list[set[int] | None]:
    """Read samples; the model always prefers the first option."""
    likelihoods = [-1.0] + [-20.0] * (len(options) - 1)
    pairs = enumerate(zip(targets, rights, strict=True))
    choices = [
        Choice({"target": target, "acc": right} | update, number, options, likelihoods)
        for number, (target, right) in pairs
    ]
    return [None if one is None else set(one) for one in right_options(choices, " ")[0]]


@pytest.mark.parametrize(
    ("rights", "expected"),
    [
        ([1.0, 0.0], [{0}, {1}]),  # texts: "4" is the first option
        ([0.0, 1.0], [set(), {0}]),  # indices: 4 is none
        ([1.0, 1.0], [None, None]),
    ],
)
def test_reading_of_numerals_explains_what_was_right(
    rights: list[float], expected: list[set[int] | None]
) -> None:
    assert found(["4", "0"], rights, DIGITS) == expected


def test_readings_that_explain_all_samples_alike_do_not_decide() -> None:
    # The model is wrong about both: 1 is the second option or the last.
    assert found(["1", "1"], [0.0, 0.0], DIGITS) == [None, None]
    assert found(["1", "1"], [0.0, 0.0], DIGITS, mcc=[3, 0]) == [{3}, {3}]


def test_normalized_accuracy_alone_decides_between_readings() -> None:
    without_acc = {"acc": None, "acc_norm": 1.0}
    assert found(["4", "0"], [1.0, 1.0], [" 0", " 4"], **without_acc) == [None, None]
    assert found(["4", "4"], [1.0, 1.0], DIGITS, **without_acc) == [{0}, {0}]
    assert found(["0", "0"], [1.0, 1.0], DIGITS, **without_acc) == [{0}, {0}]


def test_right_one_of_two_contexts_follows_from_the_score() -> None:
    same = [" was here"] * 2
    assert found(["was here"] * 2, [1.0, 0.0], same) == [{0}, {1}]
    # Of three contexts, another one is right.
    assert found(["was here"] * 2, [1.0, 0.0], [" was here"] * 3) == [None, None]


@pytest.mark.parametrize(
    ("target", "expected"),
    [("[0, 2]", {0, 2}), ("[x", set()), ("[]", set()), ("[9]", set())],
)
def test_several_options_are_right_if_the_target_lists_them(
    target: str, expected: set[int]
) -> None:
    assert found([target], [float(0 in expected)], DIGITS) == [expected]
