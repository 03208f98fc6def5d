"""Verdicts that judge losses, runs or items, and replay no stage: what their messages say."""

import pytest

from assay.comparing.wording.deciding_rows import find_deciding_rows
from assay.comparing.wording.explain import explain_verdict
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict


def message(verdict: Verdict, *rows: Measurement) -> str:
    return explain_verdict(verdict, find_deciding_rows(verdict, rows)).message


def test_pass_counts_its_own_unit_and_has_no_resolution() -> None:
    verdict = Verdict(
        verdict=Outcome.PASS, levels={"equivalent": Level(verdict=Outcome.PASS, compared=5)},
        noise_ratio=0.5, limit=1.0, statistic="loss-error", resolution=0.0, compared=5,
        compared_unit="losses, tensors and runs",
    )  # fmt: skip
    row = Measurement(
        level="equivalent", module="", port="loss", statistic="loss-error", actual=1e-5,
        expected=2e-5, ratio=0.5, limit=1.0,
    )  # fmt: skip
    assert message(verdict, row) == (
        "The candidate agrees with the reference.\n"
        "  compared 5 losses, tensors and runs (equivalent 5)\n"
        "  worst at equivalent: relative error of the losses 1e-5 = 0.5x the difference that chance"
        " explains (limit 1.0x)"
    )


def test_failure_says_the_reason_of_its_level_and_no_place_of_origin() -> None:
    level = Level(verdict=Outcome.FAIL, reason="loss nan in step 3", compared=1)
    verdict = Verdict(
        verdict=Outcome.FAIL, levels={"loss": level}, compared=1, compared_unit="items",
        location=Location(phase="forward", step=3), diagnosis="non-finite",
    )  # fmt: skip
    assert message(verdict).splitlines()[0] == "loss: loss nan in step 3"
    assert "the error is made here" not in message(verdict)


@pytest.mark.parametrize(
    ("resolution", "words"),
    [
        (0.0, "resolution 0: every difference is seen"),
        (2.5, "resolution 2.5: at the place with the most noise, even zeros would agree"),
    ],
)
def test_a_resolution_that_is_no_relative_error_is_put_into_words(
    resolution: float, words: str
) -> None:
    verdict = Verdict(verdict=Outcome.PASS, compared=1, resolution=resolution)
    assert message(verdict).endswith(f"\n  {words}")
