"""One issue that says how the nightly run stands, opened, added to and closed by each run."""

import json
from collections.abc import Mapping

from assay.errors import UsageError
from assay_runners.workflow_run.github import gh, read_gh

LABEL = "nightly"
TITLE = "The nightly run fails"


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


def update_issue(failures: list[str], variables: Mapping[str, str]) -> str:
    """Open an issue or add to the open one where there are failures, else close it.

    Returns: what was done, in a sentence.
    Raises: MachineError if GitHub refuses.
    """
    listed = read_gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number,title")
    numbers = [str(issue["number"]) for issue in listed if issue["title"] == TITLE]
    run = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/actions/runs/{GITHUB_RUN_ID}".format_map(
        variables
    )
    told = f"{run}, commit {variables['GITHUB_SHA']}"
    if failures:
        body = "\n".join([told, "", *(f"- {failure}" for failure in failures)])
        if numbers:
            gh("issue", "comment", numbers[0], "--body", body)
            return f"added to issue {numbers[0]}"
        gh("label", "create", LABEL, "--force")
        gh("issue", "create", "--title", TITLE, "--label", LABEL, "--body", body)
        return "opened an issue"
    for number in numbers:
        gh("issue", "close", number, "--comment", f"Succeeds again: {told}")
    return f"closed {', '.join(numbers)}" if numbers else "nothing to tell"
