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


def test_the_table_covers_every_event_with_a_rule() -> None:
    # Only labels.yml uses pull_request_target, which the planner does not see.
    assert {case.event.name for case in CASES if case.rows} == {*RULES, "pull_request_target"}


def test_the_cases_of_the_table_have_distinct_names() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_planner_agrees_with_the_table(case: Case, fleet: Fleet) -> None:
    plan = make_plan(case.event, fleet)
    assert sorted(map(row_of_plan, started_jobs(case.event, plan, fleet))) == sorted(case.rows)
    reasons = " ".join([plan.nothing, *(f"{one.asked}: {one.why}" for one in plan.refused)])
    assert case.says in reasons
    # A plan has jobs or a reason.
    assert bool(plan.tiers or plan.machines) != bool(reasons.strip()), plan
