import pytest

from assay_runners.planning.rules import RULES, make_plan
from packages.runners.tests.fleet import FLEET
from packages.runners.tests.started_jobs import started_jobs
from packages.runners.tests.trigger_rows import Case
from packages.runners.tests.trigger_table import CASES


def test_the_table_covers_every_event_with_a_rule() -> None:
    # Only labels.yml uses pull_request_target, which the planner does not see.
    assert {case.event.name for case in CASES if case.rows} == {*RULES, "pull_request_target"}


def test_the_cases_of_the_table_have_distinct_names() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_planner_agrees_with_the_table(case: Case) -> None:
    plan = make_plan(case.event, FLEET)
    assert sorted(started_jobs(case.event, plan)) == sorted(case.rows)
    reasons = " ".join([plan.nothing, *(f"{one.asked}: {one.why}" for one in plan.refused)])
    assert case.says in reasons
    # A plan has jobs or a reason.
    assert bool(plan.tiers or plan.machines) != bool(reasons.strip()), plan
