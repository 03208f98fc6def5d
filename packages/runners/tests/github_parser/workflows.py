"""Evaluates the workflows of a checkout for an event with GitHub's own packages."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from assay.errors import MachineError, UsageError, exit_in_words
from packages.runners.tests.fleet import ROOT
from packages.runners.tests.github_parser.installing import BUNDLE, FOLDER

WORKFLOWS = Path(".github/workflows")

# The exit code of evaluate.mjs for invalid input.
_REFUSED = 1
_TIMEOUT_SECONDS = 120
# The required fields of the `github` context.
_GITHUB = ("sha", "ref", "repository", "run_id")

Result = Literal["success", "failure", "cancelled", "skipped"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EventCase(_Model):
    """An event, and the facts that are only known while its jobs run."""

    name: str
    event_name: str
    event: dict[str, Any]
    """The payload. A schedule has `schedule`; a dispatch has `workflow`
    (".github/workflows/bench.yml") and `inputs`."""
    github: dict[str, Any]
    """The rest of the `github` context, with sha, ref, repository and run_id."""
    vars: dict[str, str] = {}
    """The variables of the repository."""
    outputs: dict[str, dict[str, dict[str, str]]] = {}
    """By workflow, job and name. A job of a called workflow is named by its path of ids, "plan / plan";
    the calling job, by its id, has the outputs of the workflow."""
    results: dict[str, dict[str, Result]] = {}
    """By workflow and job. Other jobs that run succeed."""

    @model_validator(mode="after")
    def _has_context(self) -> Self:
        missing = [name for name in _GITHUB if not self.github.get(name)]
        if missing:
            raise ValueError(f"github lacks {', '.join(missing)}")
        return self


class RunsOn(_Model):
    """The runners that accept a job."""

    group: str | None
    labels: tuple[str, ...]


class Concurrency(_Model):
    """A concurrency group: its jobs do not run at the same time."""

    group: str
    cancel_in_progress: bool = Field(alias="cancel-in-progress")


class EvaluatedJob(_Model):
    """A job that runs, once for each combination of its matrix."""

    workflow: str
    """The file name of the workflow that the event started."""
    job: str
    """The path of ids from the calling job: "machines / run"."""
    matrix: dict[str, Any]
    inputs: dict[str, str | bool | int | float]
    """The inputs of the dispatch or of the called workflow."""
    runs_on: RunsOn
    checkouts: tuple[str, ...]
    """The commit of each actions/checkout."""
    permissions: dict[str, Literal["read", "write"]] | None
    """The permissions of its token, without "none". None stands for the repository's settings."""
    environment: str | None
    timeout_minutes: int | float | None
    """None stands for GitHub's default."""
    concurrency: Concurrency | None


class SkippedJob(_Model):
    """A job of a started workflow whose `if` is false, or that needs a job that did not run."""

    workflow: str
    job: str


class FailedJob(_Model):
    """A job that GitHub fails before it has a runner, for example because of an empty matrix."""

    workflow: str
    job: str
    message: str


class EvaluatedCase(_Model):
    """The jobs that an event starts."""

    name: str
    workflows: dict[str, bool]
    """For each workflow file, true if the event starts it."""
    jobs: tuple[EvaluatedJob, ...]
    skipped: tuple[SkippedJob, ...]
    errors: tuple[FailedJob, ...]


_CASES = TypeAdapter(list[EvaluatedCase])


def evaluate(
    root: Path,
    cases: Sequence[EventCase],
    *,
    reusable: Mapping[str, str] | None = None,
    folder: Path = ROOT / FOLDER,
) -> list[EvaluatedCase]:
    """Evaluate the workflows below `root` for each case.

    reusable: the texts of called workflows that are not below `root`, by the value of `uses`. Workflows of
        the repository itself are read from `root`, for any commit in `uses`.
    folder: the installed packages.
    Raises: UsageError if a workflow cannot be parsed; MachineError if node crashes.
    """
    asked = {
        "workflows": read_workflows(root),
        "reusable": dict(reusable or {}),
        "cases": [case.model_dump(mode="json") for case in cases],
    }
    ended = subprocess.run(
        ["node", folder / BUNDLE],
        input=json.dumps(asked), capture_output=True, encoding="utf-8", check=False,
        timeout=_TIMEOUT_SECONDS,
    )  # fmt: skip
    if ended.returncode == _REFUSED:
        raise UsageError(f"the workflows cannot be evaluated:\n{ended.stderr.strip()}")
    if ended.returncode != 0:
        raise MachineError(f"node {exit_in_words(ended.returncode)}:\n{ended.stderr.strip()}")
    return _CASES.validate_python(json.loads(ended.stdout)["cases"])


def read_workflows(root: Path) -> dict[str, str]:
    """Read the workflows below `root`, by file name."""
    files = sorted(
        file for file in (root / WORKFLOWS).glob("*") if file.suffix in (".yml", ".yaml")
    )
    if not files:
        raise UsageError(f"{root / WORKFLOWS} has no workflow; name a checkout of assay")
    return {file.name: file.read_text(encoding="utf-8") for file in files}
