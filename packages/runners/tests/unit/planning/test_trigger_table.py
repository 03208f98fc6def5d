from pathlib import Path

import pytest

from assay_runners.fleet.entries import Fleet
from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.rules import RULES, make_plan
from packages.runners.tests.started_jobs import started_jobs
from packages.runners.tests.trigger_rows import Case, row_of_plan
from packages.runners.tests.trigger_table import CASES

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return read_fleet(ROOT)


def test_every_event_that_starts_something_is_in_the_table() -> None:
    # The planner answers nothing for pull_request_target: labels.yml waits for it alone.
    assert {case.event.name for case in CASES if case.rows} == {*RULES, "pull_request_target"}


def test_the_cases_of_the_table_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_planner_starts_what_the_table_says(case: Case, fleet: Fleet) -> None:
    plan = make_plan(case.event, fleet)
    assert sorted(map(row_of_plan, started_jobs(case.event, plan, fleet))) == sorted(case.rows)
    told = " ".join([plan.nothing, *(f"{one.asked}: {one.why}" for one in plan.refused)])
    assert case.says in told
    # Nothing is silent: a plan has jobs, or says why not.
    assert bool(plan.tiers or plan.machines) != bool(told.strip()), plan
