"""The issues of the nightly run: failed jobs, and a runner version to which GitHub will send no jobs."""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta

from assay.errors import UsageError
from assay_runners.fleet.reading import GITHUB_FILE
from assay_runners.workflow_run.outputs import describe_run
from assay_runners.workflow_run.programs import read_gh, run_program

LABEL = "nightly"
NIGHT_FAILS = "The nightly run fails"
RUNNER_IS_OLD = "The machines need a newer runner"

# GitHub sends no jobs to a runner 30 days after the next release:
# https://github.com/orgs/community/discussions/194762
_LIFETIME = timedelta(days=30)
# The time to build the images and to deploy them.
_NOTICE = timedelta(days=14)
_NUM_RELEASES = 100


def read_failures(results: str) -> list[str]:
    """Read the failed jobs from `toJSON(needs)`.

    A skipped job counts as failed if another job failed or no job succeeded: nothing ran.
    Raises: UsageError if the text has another form or no job.
    """
    try:
        jobs = {str(name): str(job["result"]) for name, job in json.loads(results).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"these are not results of jobs: {error!r}") from None
    if not jobs:
        raise UsageError("these are the results of no job")
    nothing_failed = all(result in ("success", "skipped") for result in jobs.values())
    if nothing_failed and "success" in jobs.values():
        return []
    return [f"{name}: {result}" for name, result in jobs.items() if result != "success"]


def update_issue(title: str, reasons: list[str], variables: Mapping[str, str]) -> str:
    """Open the issue or comment on it if there are reasons; otherwise close it.

    title: identifies the issue.
    variables: the environment of the workflow run.
    Returns: a sentence about the action taken.
    Raises: UsageError outside a workflow run; MachineError if GitHub refuses.
    """
    run = describe_run(variables)
    listed = read_gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number,title")
    numbers = [str(issue["number"]) for issue in listed if issue["title"] == title]
    if reasons:
        body = "\n".join([run, "", *(f"- {reason}" for reason in reasons)])
        if numbers:
            run_program("gh", "issue", "comment", numbers[0], "--body", body)
            return f"{title}: commented on issue {numbers[0]}"
        run_program("gh", "label", "create", LABEL, "--force")
        run_program("gh", "issue", "create", "--title", title, "--label", LABEL, "--body", body)
        return f"{title}: opened an issue"
    for number in numbers:
        run_program("gh", "issue", "close", number, "--comment", f"Resolved: {run}")
    return f"{title}: closed {', '.join(numbers)}" if numbers else f"{title}: no"


def find_outdated_runner(pinned: str, now: datetime) -> str:
    """Say why the images need a newer runner within two weeks; "" if they do not.

    pinned: their version, such as "2.338.0".
    now: with a time zone.
    Raises: MachineError if GitHub does not answer.
    """
    releases = read_gh("api", f"repos/actions/runner/releases?per_page={_NUM_RELEASES}")
    published = {
        str(release["tag_name"]).removeprefix("v"): datetime.fromisoformat(release["published_at"])
        for release in releases
        if not (release["draft"] or release["prerelease"])
    }
    if pinned not in published:
        return (
            f"{GITHUB_FILE}: runner {pinned} is not among the last {_NUM_RELEASES} releases of"
            " https://github.com/actions/runner"
        )
    newer = {version: date for version, date in published.items() if date > published[pinned]}
    if not newer:
        return ""
    deadline = min(newer.values()) + _LIFETIME
    if now < deadline - _NOTICE:
        return ""
    newest = max(newer, key=newer.__getitem__)
    return (
        f"{GITHUB_FILE}: GitHub sends no jobs to runner {pinned} from {deadline:%Y-%m-%d} on."
        f" Write {newest} and the digest of its image there, run `assay runners render`, and"
        " rebuild the images"
    )
