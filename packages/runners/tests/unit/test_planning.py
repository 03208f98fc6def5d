"""Plans of events."""

from pathlib import Path

import pytest

from assay.foreign_text import escape_output
from assay_runners.fleet import Fleet, read_fleet
from assay_runners.planning import (
    RULES,
    MachineJob,
    Plan,
    Refusal,
    SessionCall,
    TierJob,
    explain_plan,
    make_plan,
    summarize_plan,
)
from assay_runners.workflow_run import read_event
from packages.core.tests.poison import assert_harmless_markdown, assert_harmless_text, poisoned
from packages.runners.tests.event_payloads import dispatch, labeled
from packages.runners.tests.fleet import FLEET, ROOT
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


EVENTS = sorted((ROOT / "examples/events").iterdir())
NUM_TIERS = {
    "dispatch-bench": 0, "dispatch-recapture": 0, "documentation": 0, "opened": 14,
    "push-main": 14, "schedule-nightly": 8,
}  # fmt: skip


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: file.stem)
def test_each_example_starts_the_jobs_of_its_name(file: Path) -> None:
    event, fleet = read_event(str(file), {}), read_fleet(ROOT)
    asked = f"{event.inputs.get('vendor', '')} {event.inputs.get('vendors', '')}".split()
    session = "bench" if "vendor" in event.inputs else "expectations"
    able = {one.target for one in fleet.runners() if session in one.kind.sessions}
    plan = make_plan(event, fleet)
    assert len(plan.tiers) == NUM_TIERS[file.stem]
    assert [job.target for job in plan.machines] == [name for name in asked if name in able]


def test_every_example_has_a_test() -> None:
    assert {file.stem for file in EVENTS} == set(NUM_TIERS)


def only(*names: str) -> Fleet:
    vendors = tuple(vendor for vendor in FLEET.vendors if vendor.name in names)
    return FLEET.model_copy(update={"vendors": vendors})


def without_expectations(name: str) -> Fleet:
    """Make the fleet without this session on the machines of one vendor."""
    vendors = [
        one.model_copy(update={"runners": tuple(
            kind.model_copy(update={"sessions": ("check", "smoke")}) for kind in one.runners
        )}) if one.name == name else one
        for one in FLEET.vendors
    ]  # fmt: skip
    return FLEET.model_copy(update={"vendors": tuple(vendors)})


def test_all_is_every_configured_vendor_that_runs_the_tier() -> None:
    every = {vendor.name for vendor in FLEET.vendors}
    for fleet, expected in (
        (without_expectations("gaudi"), every - {"gaudi"}),
        (only("amd", "nvidia"), {"amd", "nvidia"}),
        (only("amd"), {"amd"}),
    ):
        for event in (
            dispatch("recapture.yml", models="micro:llama", vendors="all", reason="x"),
            labeled("expectations:all"),
        ):
            assert {job.target for job in make_plan(event, fleet).machines} == expected


def test_a_machine_that_does_not_run_the_tier_is_refused() -> None:
    fleet = without_expectations("gaudi")
    for event in (
        dispatch("recapture.yml", models="micro:llama", vendors="cpu gaudi", reason="x"),
        labeled("expectations:gaudi"),
    ):
        plan = make_plan(event, fleet)
        assert plan.machines == ()
        assert [one.why for one in plan.refused] == [
            "the machines of gaudi run no session of expectations"
        ]


def test_a_vendor_that_is_not_configured_is_refused_and_never_waited_for() -> None:
    plan = make_plan(labeled("smoke:cuda"), only("amd"))
    assert (plan.tiers, plan.machines) == ((), ())
    assert [one.why for one in plan.refused] == ["there is no machine 'cuda'; there are amd, all"]


CALL = SessionCall(session="s", arguments=("a",))
PLAN = Plan(
    event="e", sha="0", nothing="nothing",
    tiers=(TierJob(session="s", python="3.11"),),
    afterwards=(CALL,),
    machines=(
        MachineJob(
            target="cpu", tier="smoke", cards=0, calls=(CALL,), timeout_minutes=1,
            variables={"A": "b"}, why="w",
        ),
    ),
    refused=(Refusal(asked="a", why="w"),),
)  # fmt: skip
PLANS = dict(poisoned(PLAN))


@pytest.mark.parametrize("path", PLANS)
def test_text_in_a_plan_cannot_inject_markup(path: str) -> None:
    assert len(PLANS) >= 10
    assert_harmless_text(escape_output(explain_plan(PLANS[path])))
    assert_harmless_markdown(summarize_plan(PLANS[path]))
