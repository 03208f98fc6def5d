"""Every diagnosis of the contract can be explained."""

from typing import get_args

import pytest

from assay.comparing.wording.diagnoses import describe_diagnosis, list_diagnoses, load_diagnoses
from assay.errors import UsageError
from assay.verdicts import Diagnosis, Outcome

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
    assert str(caught.value) == "unknown diagnosis 'modul-error'; did you mean module-error?"


def test_an_unknown_diagnosis_names_all() -> None:
    with pytest.raises(UsageError, match=r"^unknown diagnosis 'xyzzy'; known: module-error, non-f"):
        describe_diagnosis("xyzzy")


def test_the_list_holds_name_verdict_and_summary() -> None:
    assert list_diagnoses()[0] == (
        "module-error",
        "FAIL",
        "one module computes something else from the same inputs",
    )
