"""Writes what a step leaves for the jobs after it, and the summary that people see."""

from collections.abc import Mapping
from pathlib import Path

from assay.errors import UsageError


def run_variable(name: str, variables: Mapping[str, str]) -> str:
    """A variable that GitHub sets for every workflow run. Raises: UsageError outside of one."""
    if not variables.get(name):
        raise UsageError(f"{name} is not set: this command belongs to a workflow run")
    return variables[name]


def describe_run(variables: Mapping[str, str]) -> str:
    """The address of the workflow run, and its commit. Raises: UsageError outside of one."""
    server, repository, run, sha = (
        run_variable(f"GITHUB_{name}", variables)
        for name in ("SERVER_URL", "REPOSITORY", "RUN_ID", "SHA")
    )
    return f"{server}/{repository}/actions/runs/{run}, commit {sha}"


def write_outputs(values: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Set the step's outputs; nothing outside of a workflow run.

    values: each of one line.
    """
    path = variables.get("GITHUB_OUTPUT")
    if not path:
        return
    lines = []
    for name, value in values.items():
        if "\n" in value or "\r" in value:
            raise ValueError(f"the output {name} has several lines")
        lines.append(f"{name}={value}\n")
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(lines)


# GitHub shows nothing at all of a step's summary that is larger than 1 MiB.
_MOST_BYTES = 1024 * 1024 - 1024


def add_to_summary(markdown: str, variables: Mapping[str, str]) -> None:
    """Append to the step's summary; nothing outside of a workflow run.

    What is over GitHub's limit is cut off at its end, and says so.
    """
    path = variables.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    text = f"{markdown.rstrip(chr(10))}\n\n".encode()
    with Path(path).open("ab") as file:
        room = _MOST_BYTES - file.tell()
        if len(text) > room:
            text = (
                text[: max(room, 0)] + "\n\n… the rest is in the artifacts of the job.\n".encode()
            )
        file.write(text)
