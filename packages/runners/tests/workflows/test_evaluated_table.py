"""GitHub's own parser, on the committed workflows, agrees with the trigger table."""

import itertools
import json
from collections import Counter
from collections.abc import Collection

import pytest
from ruamel.yaml import YAML

from assay_runners.planning import Event, Plan, make_plan
from packages.runners.tests.event_payloads import (
    AUTHOR,
    BOT,
    CODE,
    DOCUMENTS,
    MAINTAINER,
    REPOSITORY,
    labeled,
    pull_request,
)
from packages.runners.tests.fleet import FLEET, GITHUB, ROOT
from packages.runners.tests.github_parser.workflows import (
    EvaluatedCase,
    EvaluatedJob,
    EventCase,
    evaluate,
)
from packages.runners.tests.started_jobs import started_jobs
from packages.runners.tests.trigger_rows import FORK, Case, Row
from packages.runners.tests.trigger_table import CASES

# The variables without which a workflow starts nothing.
OPT_IN = {
    "nightly.yml": "ASSAY_NIGHTLY",
    "reaper.yml": "ASSAY_REAPER_ROLE",
    "release.yml": "ASSAY_RELEASE",
    "site.yml": "ASSAY_SITE",
}


def asked(
    name: str, event: Event, plan: Plan | None = None, variables: Collection[str] = OPT_IN.values()
) -> EventCase:
    """Make a case from the event and the outputs of the planning job."""
    plan = plan or make_plan(event, FLEET)
    lists = {
        "tiers": json.dumps([job.model_dump() for job in plan.tiers]),
        "machines": json.dumps([job.model_dump() for job in plan.machines]),
    }
    called = {"plan": lists, "plan / plan": lists}
    # A plan with a refusal fails, and so do all jobs that need it.
    result = {"plan / plan": "failure" if plan.refused else "success"}
    workflows = ("ci.yml", "smoke.yml", "bench.yml", "recapture.yml")
    return EventCase.model_validate({
        "name": name,
        "event_name": event.name,
        "event": event.payload,
        "github": {
            "sha": event.sha, "ref": event.ref, "repository": GITHUB.repository,
            "run_id": "1", "workflow": "w",
        },
        "vars": dict.fromkeys(variables, "1"),
        "outputs": {**dict.fromkeys(workflows, called), "nightly.yml": {"plan": {"tiers": lists["tiers"]}}},
        "results": dict.fromkeys(workflows, result),
    })  # fmt: skip


@pytest.fixture(scope="module")
def evaluated() -> dict[str, EvaluatedCase]:
    found = evaluate(ROOT, [asked(case.name, case.event) for case in CASES])
    return {one.name: one for one in found}


def row(job: EvaluatedJob) -> Row:
    assert len(set(job.checkouts)) <= 1, f"{job.job} checks out {job.checkouts}"
    permissions = job.permissions
    assert permissions is not None, f"{job.job} has what the repository's settings give"
    return Row(
        workflow=job.workflow,
        job=job.job,
        labels=" ".join(job.runs_on.labels),
        sha=next(iter(job.checkouts), ""),
        permissions=" ".join(sorted(f"{name}:{level}" for name, level in permissions.items())),
        environment=job.environment or "",
        group=job.runs_on.group or "",
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_workflows_agree_with_the_table(
    case: Case, evaluated: dict[str, EvaluatedCase]
) -> None:
    found = evaluated[case.name]
    assert found.errors == ()
    assert sorted(map(row, found.jobs)) == sorted(case.rows)


@pytest.mark.parametrize("chosen", [None, *OPT_IN])
def test_a_workflow_of_a_copy_starts_nothing_without_its_variable(chosen: str | None) -> None:
    variables = [OPT_IN[chosen]] if chosen else []
    left_out = OPT_IN.keys() - {chosen}
    assert left_out <= {one.workflow for case in CASES for one in case.rows}
    found = evaluate(ROOT, [asked(case.name, case.event, variables=variables) for case in CASES])
    for case, one in zip(CASES, found, strict=True):
        assert one.errors == ()
        expected = [job for job in case.rows if job.workflow not in left_out]
        assert sorted(map(row, one.jobs)) == sorted(expected), case.name


def test_the_jobs_of_a_run_have_distinct_concurrency_groups_and_machines(
    evaluated: dict[str, EvaluatedCase],
) -> None:
    groups = {
        name: [job.concurrency.group for job in found.jobs if job.concurrency]
        for name, found in evaluated.items()
    }
    assert sum(map(len, groups.values())) > 300
    assert {name for name, listed in groups.items() if len(set(listed)) < len(listed)} == set()
    # With max_runners = 1, a run that needs two runners of a label might wait for itself.
    machines = {
        name: [job.runs_on.labels for job in found.jobs if job.runs_on.group]
        for name, found in evaluated.items()
    }
    assert max(map(len, machines.values())) == len(FLEET.vendors)
    assert {name for name, found in machines.items() if len(set(found)) < len(found)} == set()


# The pull request can change the planner and every workflow except the one with the machines.
REACHED = labeled("smoke:nvidia")
FORGED = make_plan(REACHED, FLEET)
BENCH_FORGED = FORGED.model_copy(
    update={"machines": tuple(job.model_copy(update={"tier": "bench"}) for job in FORGED.machines)}
)


@pytest.mark.parametrize(
    "event",
    [
        labeled("smoke:nvidia", head=FORK, sender=AUTHOR),
        labeled("smoke:nvidia", head=None, sender=AUTHOR),
        labeled("smoke:nvidia", sender=BOT),
        labeled("smoke:nvidia", state="closed"),
        labeled("bench:nvidia"),
        labeled("expectations:nvidia"),
        labeled("smoke:nvidia-4"),
        labeled("smoke:amd", labels=("smoke:amd", "smoke:nvidia")),
        labeled("a:b", labels=("a:b", "smoke:nvidia")),
    ],
    ids=[
        "by the author of a fork", "by the author of a deleted fork", "by a program", "closed",
        "benchmarks", "another tier", "more cards", "another vendor beside the right label",
        "any label beside the right one",
    ],
)  # fmt: skip
def test_a_forged_plan_reaches_no_machine(event: Event) -> None:
    forged = [asked(plan.machines[0].tier, event, plan) for plan in (FORGED, BENCH_FORGED)]
    reached, *found = evaluate(ROOT, [asked("reached", REACHED), *forged])
    assert [job.runs_on.labels for job in reached.jobs if job.runs_on.group] == [("assay-nvidia",)]
    for one in found:
        assert [job.job for job in one.jobs if job.runs_on.group] == []
        assert ("smoke.yml", "machines / run") in {(job.workflow, job.job) for job in one.skipped}


def test_a_new_commit_with_a_forged_plan_reaches_no_machine() -> None:
    event = pull_request("synchronize", labels=("smoke:nvidia",))
    (found,) = evaluate(ROOT, [asked("new commit", event, FORGED)])
    assert found.workflows["smoke.yml"] is False
    assert [job.job for job in found.jobs if job.runs_on.group] == []


def test_planner_and_workflows_agree_on_every_combination() -> None:
    labels = (
        "smoke:nvidia", "smoke:gaudi-8", "EXPECTATIONS:all", "smoke:none", "x:y", "bug", "bench:cpu",
        "smoke: nvidia",
    )  # fmt: skip
    facts = itertools.product(
        ("labeled", "unlabeled", "opened", "synchronize", "closed"), labels, (REPOSITORY, FORK, None),
        (MAINTAINER, AUTHOR, BOT), ("open", "closed"), (CODE, DOCUMENTS, None),
    )  # fmt: skip
    events = [
        pull_request(
            action, label=label, labels=(label,), head=head, sender=sender, state=state, changed=changed
        )
        for action, label, head, sender, state, changed in facts
    ]  # fmt: skip
    found = evaluate(ROOT, [asked(str(number), event) for number, event in enumerate(events)])
    unlike = [
        event
        for event, one in zip(events, found, strict=True)
        if one.errors
        or Counter(map(row, one.jobs)) != Counter(started_jobs(event, make_plan(event, FLEET)))
    ]
    assert len(events) == 2160
    assert unlike == []


def test_ci_runs_the_planned_training() -> None:
    plan = make_plan(pull_request("opened"), FLEET)
    workflow = YAML(typ="safe").load(
        (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    )
    lines = [step["run"] for step in workflow["jobs"]["smoke"]["steps"] if "run" in step]
    assert lines == [str(call) for call in plan.afterwards] != []
