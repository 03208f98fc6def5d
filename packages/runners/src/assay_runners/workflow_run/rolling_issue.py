"""The issues that the nightly run opens, comments on and closes."""

import json
from collections.abc import Mapping

from assay.errors import UsageError
from assay_runners.workflow_run.outputs import describe_run
from assay_runners.workflow_run.programs import read_gh, run_program

LABEL = "nightly"
NIGHT_FAILS = "The nightly run fails"
RUNNER_IS_OLD = "The machines need a newer runner"


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
