"""The rows of the trigger table, and functions for rows that several events share."""

from dataclasses import dataclass

from assay_runners.planning import Event
from packages.runners.tests.event_payloads import HEAD, MAIN, pull_request
from packages.runners.tests.fleet import FLEET, GITHUB

FORK = "author/assay"
BRANCH = "refs/heads/faster"
PROTECTED = f"refs/heads/{GITHUB.protected_ref}"


@dataclass(frozen=True, order=True)
class Row:
    """A started job."""

    workflow: str
    job: str
    """Its id; for a job of a called workflow "CALLER / CALLED"."""
    labels: str
    sha: str = ""
    """The commit that it checks out; "" if it checks out nothing."""
    permissions: str = ""
    """Sorted, such as "contents:read issues:write"."""
    environment: str = ""
    group: str = ""
    """Its runner group; "" for GitHub-hosted machines."""


@dataclass(frozen=True)
class Case:
    """An event and its jobs. says: a part of the plan's reason or refusal."""

    name: str
    event: Event
    rows: tuple[Row, ...] = ()
    says: str = ""


HOSTED = GITHUB.hosted
READ = "contents:read"


def planned(workflow: str, sha: str) -> Row:
    return Row(workflow, "plan / plan", HOSTED, sha, READ)


def tests(workflow: str, sha: str, count: int) -> tuple[Row, ...]:
    return (Row(workflow, "tests / session", HOSTED, sha, READ),) * count


REQUIRED = Row("ci.yml", "required", HOSTED)


def training(sha: str) -> Row:
    return Row("ci.yml", "smoke", HOSTED, sha, READ)


def ci(sha: str) -> tuple[Row, ...]:
    """Make seven sessions on each version of Python, a training on the CPU, and the required check."""
    sessions = tests("ci.yml", sha, 7 * len(GITHUB.pythons))
    return (planned("ci.yml", sha), *sessions, training(sha), REQUIRED)


def ci_with_nothing_to_do(sha: str) -> tuple[Row, ...]:
    return (planned("ci.yml", sha), REQUIRED)


def machine(workflow: str, name: str, sha: str) -> tuple[Row, ...]:
    """Make the job on the machine, and the job that fails if it did not run."""
    job = Row(workflow, "machines / run", name, sha, READ, name, GITHUB.runner_group)
    return (job, Row(workflow, "machines / ran", HOSTED))


def smoke(*names: str) -> tuple[Row, ...]:
    """Make three sessions, then a job on each machine."""
    machines = [row for name in names for row in machine("smoke.yml", name, HEAD)]
    return (planned("smoke.yml", HEAD), *tests("smoke.yml", HEAD, 3), *machines)


PLAN_ALONE = (planned("smoke.yml", HEAD),)
# Each vendor's machine with the fewest cards.
EVERY = tuple(f"assay-{vendor.name}" for vendor in FLEET.vendors)


def approval(workflow: str) -> Row:
    return Row(workflow, "approve", HOSTED, environment=workflow.removesuffix(".yml"))


def by_hand(workflow: str, *names: str) -> tuple[Row, ...]:
    """Make an approval, the plan, then the machines."""
    machines = [row for name in names for row in machine(workflow, name, MAIN)]
    return (approval(workflow), planned(workflow, MAIN), *machines)


PROPOSE = Row("recapture.yml", "propose", HOSTED, MAIN, "contents:write pull-requests:write")


def recapture(*names: str) -> tuple[Row, ...]:
    return (*by_hand("recapture.yml", *names), PROPOSE)


def night(count: int, ref: str = PROTECTED) -> tuple[Row, ...]:
    """Make the nightly sessions. Only main has a report, because the issue is about main."""
    plan = Row("nightly.yml", "plan", HOSTED, MAIN, "actions:read contents:read")
    report = Row("nightly.yml", "report", HOSTED, MAIN, "contents:read issues:write")
    reports = [report] if ref == PROTECTED else []
    return (plan, *tests("nightly.yml", MAIN, count), *reports)


REAP = (Row("reaper.yml", "reap", HOSTED, MAIN, "contents:read id-token:write", "reaper"),)
CONFLICTS = Row("labels.yml", "conflicts", HOSTED, permissions="pull-requests:write")

BUILD = Row("release.yml", "build", HOSTED, MAIN, READ)
PUBLISH = Row("release.yml", "publish", HOSTED, "", "id-token:write", "release")
SITE = (
    Row("site.yml", "site", HOSTED, MAIN, READ),
    Row("site.yml", "deploy", HOSTED, "", "id-token:write pages:write", "github-pages"),
)


def withdrawn(count: int) -> tuple[Row, ...]:
    return (Row("labels.yml", "withdraw", HOSTED, permissions="pull-requests:write"),) * count


def new_commit(*labels: str) -> Event:
    return pull_request("synchronize", labels=labels, event="pull_request_target")
