"""The digits of every message."""

import math

import pytest

from assay.comparing.wording.numerals import format_against, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.041, "4.1e-2"),
        (0.0084, "8.4e-3"),
        (1e-300, "1e-300"),
        (0.1, "0.1"),
        (0.09996, "0.1"),
        (0.5871, "0.587"),
        (1.0, "1.0"),
        (3.0, "3.0"),
        (1.364, "1.36"),
        (14.62, "14.6"),
        (10.0, "10.0"),
        (518.4, "518"),
        (100.0, "100"),
        (9994.0, "9990"),
        (9999.0, "1e4"),
        (1.234e6, "1.23e6"),
        (-0.25, "-0.25"),
        (-3e-5, "-3e-5"),
        (0.0, "0"),
        (5e-324, "4.94e-324"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_three_digits_and_no_padding(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_ratio_just_over_its_limit_is_printed_as_larger() -> None:
    assert format_against(3.004, 3.0) == ("3.004", "3.0")
    assert format_against(3.0000004, 3.0) == ("3.0000004", "3.0")


def test_numbers_that_differ_visibly_keep_three_digits() -> None:
    assert format_against(14.62, 3.0) == ("14.6", "3.0")


def test_equal_numbers_are_printed_alike() -> None:
    assert format_against(3.0, 3.0) == ("3.0", "3.0")


def test_nan_beside_a_limit_is_printed() -> None:
    assert format_against(math.nan, 3.0) == ("nan", "3.0")
