import tomllib
from pathlib import Path

import pytest

from assay.comparing.limits import (
    CleanRun,
    DerivedLimit,
    calibrate_limits,
    limits_file,
    load_limits,
)

RUNS = [
    CleanRun("one", {"replay-row": 4.0, "loss-error": 2.0}),
    CleanRun("other", {"replay-row": 3.0, "loss-error": 40.0}),
]


def test_limit_is_the_margin_times_the_largest_ratio_of_all_runs() -> None:
    assert calibrate_limits(RUNS) == {"loss-error": 50.0, "replay-row": 5.0}


@pytest.mark.parametrize(("derived", "limit"), [(60.0, 60.0), (20.0, 50.0)])
def test_derived_limit_is_widened_by_runs_and_never_narrowed(
    tmp_path: Path, derived: float, limit: float
) -> None:
    file = tmp_path / "limits.toml"

    file.write_text(limits_file(RUNS, "here", {"loss-error": DerivedLimit(derived, "Of F(3, 3).")}))

    limits = load_limits(str(file))
    assert limits.by_statistic == {"loss-error": limit, "replay-row": 5.0}
    assert f"# loss-error, at least {derived}: Of F(3, 3).\n" in file.read_text()


def test_derived_limit_needs_no_run_that_has_the_statistic(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    runs = [CleanRun("one", {"replay-row": 4.0})]

    file.write_text(limits_file(runs, "here", {"loss-error": DerivedLimit(20.0, "A reason.")}))

    assert load_limits(str(file)).by_statistic == {"loss-error": 20.0, "replay-row": 5.0}


def test_file_names_every_run_with_its_ratios() -> None:
    data = tomllib.loads(limits_file(RUNS, "here"))

    assert data["runs"] == {run.name: dict(run.ratios) for run in RUNS}
    assert data["origin"] == "calibrated on 2 clean runs"
