"""The rows of the trigger table, and functions for rows that several events share."""

from dataclasses import dataclass
from pathlib import Path

from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.events import Event
from packages.runners.tests.event_payloads import HEAD, MAIN, pull_request
from packages.runners.tests.started_jobs import StartedJob

FORK = "author/assay"
BRANCH = "refs/heads/faster"
NIGHT, REAPER = "17 2 * * *", "41 * * * *"


@dataclass(frozen=True, order=True)
class Row:
    """A started job. permissions: sorted, such as "contents:read issues:write"."""

    workflow: str
    job: str
    labels: str
    sha: str = ""
    permissions: str = ""
    environment: str = ""
    group: str = ""


def row_of_plan(job: StartedJob) -> Row:
    """Convert a job of the planner."""
    return Row(
        workflow=job.workflow,
        job=job.job,
        labels=" ".join(job.labels),
        sha=job.sha,
        permissions=" ".join(sorted(f"{name}:{level}" for name, level in job.permissions.items())),
        environment=job.environment,
        group=job.group,
    )


@dataclass(frozen=True)
class Case:
    """An event and its jobs. says: a part of the plan's reason or refusal."""

    name: str
    event: Event
    rows: tuple[Row, ...] = ()
    says: str = ""


HOSTED = "ubuntu-24.04"
READ = "contents:read"


def planned(workflow: str, sha: str) -> Row:
    return Row(workflow, "plan / plan", HOSTED, sha, READ)


def tests(workflow: str, sha: str, count: int) -> tuple[Row, ...]:
    return (Row(workflow, "tests / session", HOSTED, sha, READ),) * count


def ci(sha: str) -> tuple[Row, ...]:
    """Make six sessions on two versions of Python, a training on the CPU, and the required check."""
    smoke = Row("ci.yml", "smoke", HOSTED, sha, READ)
    return (
        planned("ci.yml", sha),
        *tests("ci.yml", sha, 12),
        smoke,
        Row("ci.yml", "required", HOSTED),
    )


def ci_with_nothing_to_do(sha: str) -> tuple[Row, ...]:
    return (planned("ci.yml", sha), Row("ci.yml", "required", HOSTED))


def machine(workflow: str, name: str, sha: str) -> tuple[Row, ...]:
    """Make the job on the machine, and the job that fails if it did not run."""
    job = Row(workflow, "machines / run", name, sha, READ, name, "assay-accelerators")
    return (job, Row(workflow, "machines / ran", HOSTED))


def smoke(*names: str) -> tuple[Row, ...]:
    """Make three sessions, then a job on each machine."""
    machines = [row for name in names for row in machine("smoke.yml", name, HEAD)]
    return (planned("smoke.yml", HEAD), *tests("smoke.yml", HEAD, 3), *machines)


PLAN_ALONE = (planned("smoke.yml", HEAD),)
# Each vendor's machine with the fewest cards.
EVERY = tuple(
    f"assay-{vendor.name}" for vendor in read_fleet(Path(__file__).resolve().parents[3]).vendors
)


def by_hand(workflow: str, *names: str) -> tuple[Row, ...]:
    """Make an approval, the plan, then the machines."""
    environment = workflow.removesuffix(".yml")
    approve = Row(workflow, "approve", HOSTED, environment=environment)
    machines = [row for name in names for row in machine(workflow, name, MAIN)]
    return (approve, planned(workflow, MAIN), *machines)


def recapture(*names: str) -> tuple[Row, ...]:
    write = "contents:write pull-requests:write"
    return (*by_hand("recapture.yml", *names), Row("recapture.yml", "propose", HOSTED, MAIN, write))


def night(count: int, ref: str = "refs/heads/main") -> tuple[Row, ...]:
    """Make the nightly sessions. Only main has a report, because the issue is about main."""
    plan = Row("nightly.yml", "plan", HOSTED, MAIN, "actions:read contents:read")
    report = Row("nightly.yml", "report", HOSTED, MAIN, "contents:read issues:write")
    reports = [report] if ref == "refs/heads/main" else []
    return (plan, *tests("nightly.yml", MAIN, count), *reports)


REAP = (Row("reaper.yml", "reap", HOSTED, MAIN, "contents:read id-token:write", "reaper"),)


def withdrawn(count: int) -> tuple[Row, ...]:
    return (Row("labels.yml", "withdraw", HOSTED, permissions="pull-requests:write"),) * count


def new_commit(*labels: str) -> Event:
    return pull_request("synchronize", labels=labels, event="pull_request_target")
