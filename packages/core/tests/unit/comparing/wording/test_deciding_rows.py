"""Which rows a verdict rests on."""

import math
from typing import Any

from assay.comparing.wording.deciding_rows import (
    find_deciding_rows,
    over_limit,
    resolution_of,
    severity,
)
from assay.comparing.wording.phrases import describe_resolution
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict


def measured(module: str, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "statistic": "replay-tensor",
        "actual": 0.02, "expected": 0.01, "ratio": 2.0, "limit": 3.0,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def failed_at(module: str, ratio: float) -> Verdict:
    return Verdict(
        verdict=Outcome.FAIL,
        location=Location(phase="forward", module=module),
        noise_ratio=ratio,
        statistic="replay-tensor",
    )


def test_the_deciding_row_is_at_the_place_with_that_very_ratio() -> None:
    right = measured("b", ratio=5.0)
    rows = [measured("a", ratio=5.0), measured("b", ratio=4.0), right]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is right


def test_another_statistic_of_that_ratio_does_not_decide() -> None:
    rows = [measured("b", ratio=5.0, statistic="replay-bins")]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is None


def test_another_phase_of_the_module_does_not_decide() -> None:
    rows = [measured("b", ratio=5.0, phase="backward")]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is None


def test_a_nan_ratio_is_found() -> None:
    row = measured("b", ratio=math.nan)
    assert find_deciding_rows(failed_at("b", math.nan), [row]).deciding is row


def test_the_worst_token_is_one_of_the_place() -> None:
    worst = measured("b", statistic="token", ratio=8.0, prompt=0, position=2)
    rows = [
        measured("a", statistic="token", ratio=9.0, prompt=0, position=1),
        measured("b", statistic="token", ratio=7.0, prompt=0, position=1),
        worst,
    ]
    assert find_deciding_rows(failed_at("b", 5.0), rows).worst_token is worst


def test_a_token_with_nan_is_worse_than_any_ratio() -> None:
    worst = measured("b", statistic="token", ratio=math.nan, prompt=0, position=2)
    rows = [worst, measured("b", statistic="token", ratio=1e30, prompt=0, position=1)]
    assert find_deciding_rows(failed_at("b", 5.0), rows).worst_token is worst


def test_a_pass_has_no_worst_token() -> None:
    row = measured("b", statistic="token", ratio=8.0, prompt=0, position=2)
    assert find_deciding_rows(Verdict(verdict=Outcome.PASS), [row]).worst_token is None


def test_the_source_of_the_limit_is_that_of_the_deciding_level() -> None:
    verdict = failed_at("b", 5.0)
    verdict.levels = {
        "logits": Level.model_validate({"verdict": "FAIL", "limits_origin": "of logits"}),
        "modules": Level.model_validate({"verdict": "FAIL", "limits_origin": "of modules"}),
    }
    assert find_deciding_rows(verdict, [measured("b", ratio=5.0)]).limits_origin == "of modules"


def test_nan_ranks_with_infinity() -> None:
    assert severity(math.nan) == math.inf
    assert severity(2.0) == 2.0


def test_rows_of_different_statistics_rank_by_ratio_over_limit() -> None:
    assert over_limit(measured("a", ratio=6.0, limit=3.0)) == 2.0
    assert over_limit(measured("a", ratio=6.0, limit=None)) == 6.0
    assert over_limit(measured("a", ratio=math.nan, limit=3.0)) == math.inf


def test_each_level_has_its_own_coarsest_row() -> None:
    rows = [
        measured("a", actual=0.01, ratio=1.0),
        measured("b", actual=0.02, expected=0.02, ratio=1.0),
        measured("c", expected=9.0, statistic="replay-slope"),  # sees one form of error only
        measured("d", expected=9.0, limit=None),
        measured("e", level="updates", actual=0.5, expected=0.5, ratio=1.0),
        measured("e", level="updates", expected=9.0, statistic="replay-row"),
    ]
    verdict = Verdict(verdict=Outcome.PASS, resolution=0.06, compared=1)
    found = find_deciding_rows(verdict, rows)

    assert {level: row.module for level, row in found.coarsest.items()} == {
        "modules": "b",
        "updates": "e",
    }
    assert describe_resolution(verdict, found) == (
        "resolution 6e-2 (modules, at b), updates 1.5: a smaller relative error may not have been"
        " seen"
    )


def test_a_floor_above_the_noise_is_what_is_resolved() -> None:
    # The noise run errs by 0.01, and the ratio is to a floor of 0.02.
    row = measured("a", actual=0.02, expected=0.01, ratio=1.0)

    assert resolution_of(row) == 3.0 * 0.02


def test_a_failure_quotes_the_resolution_of_its_own_place() -> None:
    rows = [measured("b", actual=0.05, ratio=5.0), measured("a", level="updates", expected=9.0)]
    verdict = failed_at("b", 5.0).model_copy(update={"resolution": 0.03})

    assert describe_resolution(verdict, find_deciding_rows(verdict, rows)) == (
        "resolution 3e-2 (modules, at b): a smaller relative error may not have been seen"
    )
