"""The outputs of a step, which later jobs read, and its summary, which people read."""

from collections.abc import Mapping
from pathlib import Path

from assay.errors import UsageError


def run_variable(name: str, variables: Mapping[str, str]) -> str:
    """Read a variable that GitHub sets for every workflow run. Raises: UsageError outside a run."""
    if not variables.get(name):
        raise UsageError(f"{name} is not set: this command belongs to a workflow run")
    return variables[name]


def describe_run(variables: Mapping[str, str]) -> str:
    """Write the address and the commit of the workflow run. Raises: UsageError outside a run."""
    server, repository, run, sha = (
        run_variable(f"GITHUB_{name}", variables)
        for name in ("SERVER_URL", "REPOSITORY", "RUN_ID", "SHA")
    )
    return f"{server}/{repository}/actions/runs/{run}, commit {sha}"


def write_outputs(values: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Set the step's outputs, one line each. Outside a workflow run, do nothing."""
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


# GitHub rejects a summary of more than 1 MiB.
_MAX_BYTES = 1024 * 1024 - 1024


def add_to_summary(markdown: str, variables: Mapping[str, str]) -> None:
    """Append to the step's summary, up to GitHub's limit. Outside a workflow run, do nothing."""
    path = variables.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    text = f"{markdown.rstrip(chr(10))}\n\n".encode()
    with Path(path).open("ab") as file:
        room = _MAX_BYTES - file.tell()
        if len(text) > room:
            note = "\n\n… the rest is in the artifacts of the job.\n".encode()
            text = text[: max(room, 0)] + note
        file.write(text)
