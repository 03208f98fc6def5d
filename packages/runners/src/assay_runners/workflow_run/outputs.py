"""Writes what a step hands to the jobs after it, and the summary that people see."""

from collections.abc import Mapping
from pathlib import Path


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


def add_to_summary(markdown: str, variables: Mapping[str, str]) -> None:
    """Append to the job's summary; nothing outside of a workflow run."""
    path = variables.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown.rstrip("\n") + "\n\n")
