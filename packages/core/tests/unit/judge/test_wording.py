"""The digits of every message, and an explanation of every diagnosis."""

import math
from typing import get_args

import pytest

from assay.errors import UsageError
from assay.judge.wording import (
    describe_diagnosis,
    describe_error,
    describe_level,
    format_against,
    format_number,
    list_diagnoses,
    load_diagnoses,
)
from assay.verdicts import Diagnosis, Level, Outcome, Verdict


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
        (9994.0, "9,990"),
        (9999.0, "10,000"),
        (1.234e6, "1,230,000"),
        (9.994e8, "999,000,000"),
        (9.996e8, "1e9"),
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


def test_an_absent_error_is_said_in_words() -> None:
    assert describe_error("exact", 0.0) == "every value is equal"
    assert describe_error("exact", 0.25) == "share of unequal values 0.25"
    assert describe_error("exact", None) == "share of unequal values"
    assert describe_error("non-finite", 0.0) == "every value is finite"
    assert describe_error("replay-tensor", 0.0) == "relative error 0"


def test_nan_beside_a_limit_is_printed() -> None:
    assert format_against(math.nan, 3.0) == ("nan", "3.0")


@pytest.mark.parametrize(
    ("candidate", "question"),
    [
        ({"run": "cpu/bfloat16"}, "Does every part compute the same from the same inputs?"),
        ({"format": "tensors"}, "Do the dumped inputs and outputs of modules agree?"),
    ],
)
def test_levels_of_two_dumps_ask_about_dumped_values(
    candidate: dict[str, str], question: str
) -> None:
    level = Level(verdict=Outcome.PASS)
    verdict = Verdict(verdict=Outcome.PASS, levels={"modules": level}, candidate=candidate)
    assert describe_level(verdict, "modules") == question


def test_words_of_messages_are_explained_and_are_not_diagnoses() -> None:
    assert describe_diagnosis("underpowered").startswith("underpowered (NOT_COMPARED): too few")
    assert "underpowered" not in load_diagnoses()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("PASS", "PASS: no error above the resolution"),
        ("FAIL", "FAIL: an error was found"),
        ("NOT_COMPARED", "NOT_COMPARED: something was not looked at"),
        ("0", "0 (PASS): no error"),
        ("1", "1 (FAIL): an error"),
        ("2", "2: usage or environment error"),
        ("3", "3 (NOT_COMPARED): something"),
    ],
)
def test_outcomes_and_exit_codes_are_explained(name: str, start: str) -> None:
    assert describe_diagnosis(name).startswith(start)


def test_a_level_is_explained_by_its_question_in_each_command_that_has_it() -> None:
    assert describe_diagnosis("resume") == (
        "resume is a level of assay smoke run: Does a resumed run continue as the uninterrupted one?"
    )
    assert describe_diagnosis("gradients").split("\n\n") == [
        "gradients is a level of assay check: Are the gradients the same?",
        "gradients is a level of assay compare: Do the dumped gradients agree?",
    ]
    # Also a diagnosis.
    assert describe_diagnosis("sampler").startswith("sampler (FAIL): ")
    assert "\n\nsampler is a level of assay smoke data: Is every" in describe_diagnosis("sampler")


def test_a_misspelt_level_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean first-save"):
        describe_diagnosis("fist-save")


PASSING = {"near-tie", "representation-difference", "below-resolution"}


def test_every_diagnosis_of_a_verdict_has_an_entry_and_no_other_has() -> None:
    assert set(load_diagnoses()) == set(get_args(Diagnosis))


def test_each_entry_goes_with_the_verdict_of_the_contract() -> None:
    passing = {n for n, entry in load_diagnoses().items() if entry.verdict is Outcome.PASS}
    failing = {n for n, entry in load_diagnoses().items() if entry.verdict is Outcome.FAIL}
    assert passing == PASSING
    assert failing == set(get_args(Diagnosis)) - PASSING


def test_each_entry_says_what_it_means_why_and_what_to_do() -> None:
    for name, entry in load_diagnoses().items():
        texts = [entry.summary, entry.meaning, entry.advice, *entry.causes]
        assert entry.causes, name
        for text in texts:
            assert text.strip(), name
            assert "  " not in text.strip(), name
            assert "\n" not in text.strip(), name


def test_a_diagnosis_is_described_whole() -> None:
    assert describe_diagnosis("near-tie") == (
        "near-tie (PASS): another token was chosen between two that are equally likely.\n"
        "\n"
        "Greedy decoding chose another token where the reference's two best logits differ by less "
        "than the noise of this dtype. Either choice is right, and the texts differ after it.\n"
        "\n"
        "Typical causes: two nearly equal logits, ordinary rounding.\n"
        "\n"
        "What to do next: No action is needed. Later levels used teacher forcing, which continues "
        "after this token."
    )


def test_a_misspelt_diagnosis_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        describe_diagnosis("modul-error")
    assert (
        str(caught.value) == "unknown diagnosis or level 'modul-error'; did you mean module-error?"
    )


def test_an_unknown_diagnosis_names_all() -> None:
    with pytest.raises(
        UsageError, match=r"^unknown diagnosis or level 'xyzzy'; known: module-error, non-f"
    ):
        describe_diagnosis("xyzzy")


def test_the_list_holds_name_verdict_and_summary() -> None:
    assert list_diagnoses()[0] == (
        "module-error",
        "FAIL",
        "one module computes something else from the same inputs",
    )
