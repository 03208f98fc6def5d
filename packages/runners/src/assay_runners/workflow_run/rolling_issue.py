"""Issues that the nightly run opens, adds to and closes: one for each question that it asks."""

import json
from collections.abc import Mapping

from assay.errors import UsageError
from assay_runners.workflow_run.github import gh, read_gh
from assay_runners.workflow_run.outputs import describe_run

LABEL = "nightly"
NIGHT_FAILS = "The nightly run fails"
RUNNER_IS_OLD = "The machines need a newer runner"


def read_failures(results: str) -> list[str]:
    """The jobs that did not succeed, of `toJSON(needs)`.

    A job that was skipped counts where the plan failed: nothing ran, which is no success.
    Raises: UsageError if it is no such text, or says nothing of any job.
    """
    try:
        jobs = {str(name): str(job["result"]) for name, job in json.loads(results).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"these are no results of jobs: {error!r}") from None
    if not jobs:
        raise UsageError("these are the results of no job")
    nothing_failed = all(result in ("success", "skipped") for result in jobs.values())
    if nothing_failed and "success" in jobs.values():
        return []
    return [f"{name}: {result}" for name, result in jobs.items() if result != "success"]


def update_issue(title: str, reasons: list[str], variables: Mapping[str, str]) -> str:
    """Open the issue, or add to the open one, where there are reasons, else close it.

    title: tells the issues apart.
    variables: of the workflow run.
    Returns: what was done, in a sentence.
    Raises: UsageError outside of a workflow run; MachineError if GitHub refuses.
    """
    run = describe_run(variables)
    listed = read_gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number,title")
    numbers = [str(issue["number"]) for issue in listed if issue["title"] == title]
    if reasons:
        body = "\n".join([run, "", *(f"- {reason}" for reason in reasons)])
        if numbers:
            gh("issue", "comment", numbers[0], "--body", body)
            return f"{title}: added to issue {numbers[0]}"
        gh("label", "create", LABEL, "--force")
        gh("issue", "create", "--title", title, "--label", LABEL, "--body", body)
        return f"{title}: opened an issue"
    for number in numbers:
        gh("issue", "close", number, "--comment", f"No longer so: {run}")
    return f"{title}: closed {', '.join(numbers)}" if numbers else f"{title}: no"
