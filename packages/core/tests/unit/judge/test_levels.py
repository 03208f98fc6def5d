"""What becomes of judged ratios: outcomes, pooled resolutions, rows, lists."""

import math

import pytest

from assay.judge.levels import (
    MOST_LISTED,
    Cause,
    LevelResult,
    conclude,
    describe_judged_level,
    failed,
    find_worst,
    level_of,
    list_unmatched,
    not_compared,
    not_run,
    outcome_of_levels,
    passed,
    pool_resolutions,
)
from assay.verdicts import Coverage, Level, Location, Outcome, Ratio

TENSOR = Ratio("replay-tensor", 0.004, 0.002).judged(4.0)  # half of its limit
COARSE = Ratio("replay-tensor", 0.001, 0.010).judged(4.0)
ROW = Ratio("replay-row", 0.009, 0.003).judged(4.0)  # three quarters of it
EXACT = Ratio("exact", 0.0, 0.0).judged(0.0)


@pytest.mark.parametrize(
    ("compared", "failed", "expected"),
    [
        (0, 0, Outcome.NOT_COMPARED),
        (0, 1, Outcome.NOT_COMPARED),
        (1, 0, Outcome.PASS),
        (1, 1, Outcome.FAIL),
    ],
)
def test_nothing_compared_is_never_a_pass(compared: int, failed: int, expected: Outcome) -> None:
    level = level_of(compared, failed, {"kl_mean": 0.5})

    assert (level.verdict, level.compared) == (expected, compared)
    assert level.reason == (None if compared else "nothing was compared")


def test_level_that_was_not_run_decides_nothing() -> None:
    run, not_run = Level(verdict=Outcome.PASS), Level(verdict=None, reason="one process")
    assert outcome_of_levels({"loss": run, "replicas": not_run}) is Outcome.PASS
    assert outcome_of_levels({"replicas": not_run}) is Outcome.NOT_COMPARED


def test_resolution_of_a_statistic_is_its_coarsest_and_exact_ones_have_none() -> None:
    assert pool_resolutions([TENSOR, COARSE, ROW, EXACT]) == {
        "replay-tensor": 0.04,
        "replay-row": 0.012,
    }


def test_level_is_described_by_the_ratio_nearest_to_its_limit() -> None:
    judged = [TENSOR, ROW, EXACT]
    assert find_worst(judged) is ROW
    facts = describe_judged_level(judged)
    assert facts["statistic"] == "replay-row"
    assert facts["noise_ratio"] == pytest.approx(3.0)
    assert facts["limit"] == 4.0
    assert describe_judged_level([]) == {}


def test_row_holds_the_numbers_that_were_judged() -> None:
    row = Ratio("logits-error", math.nan, 0.5).judged(2.0).measurement("logits", "logits")
    assert (row.module, row.statistic, row.expected) == ("", "logits-error", 0.5)
    assert (row.ratio, row.limit) == (math.inf, 2.0)


def test_long_lists_of_unmatched_names_are_cut() -> None:
    names = [str(number) for number in range(2 * MOST_LISTED)]
    listed = list_unmatched(names, ["extra"])
    assert (listed.expected, listed.actual) == (names[:MOST_LISTED], ["extra"])


MODULE = Cause("module-error", Location(phase="forward", module="mlp"))


def test_only_a_failure_has_a_diagnosis_and_a_place() -> None:
    wrong = conclude({"tokens": passed(3), "modules": failed(4, "one differs")}, MODULE)
    assert (wrong.verdict, wrong.diagnosis, wrong.compared) == (Outcome.FAIL, "module-error", 7)
    assert wrong.location == MODULE.location

    for level in (passed(4), not_compared("no partner", 4)):
        other = conclude({"tokens": passed(3), "modules": level}, MODULE)
        assert other.verdict is level.level.verdict
        assert (other.diagnosis, other.location, other.compared) == (None, None, 7)


@pytest.mark.parametrize(
    ("weights", "level", "diagnosis"),
    [
        (["a.weight"], passed(1), "below-resolution"),
        ([], passed(1), None),
        (["a.weight"], failed(1, "one differs"), "module-error"),
        (["a.weight"], not_compared("no partner"), None),
    ],
)
def test_different_weights_are_noted_on_a_pass_alone(
    weights: list[str], level: LevelResult, diagnosis: str | None
) -> None:
    verdict = conclude({"modules": level}, MODULE, notes=["first"], different_weights=weights)
    assert verdict.diagnosis == diagnosis
    noted = "weights differ from the reference's, and no output shows it: a.weight"
    assert verdict.notes == (["first", noted] if diagnosis == "below-resolution" else ["first"])


def test_gap_in_the_coverage_forbids_a_pass_of_levels_that_ran() -> None:
    gap = Coverage(modules=2, modules_run=1, not_run=["mlp"])
    assert conclude({"modules": passed(1)}, coverage=gap).verdict is Outcome.NOT_COMPARED
    allowed = gap.model_copy(update={"allowed": ["mlp"]})
    assert conclude({"modules": passed(1)}, coverage=allowed).verdict is Outcome.PASS
    assert conclude({"modules": not_run("no input")}).verdict is Outcome.NOT_COMPARED
