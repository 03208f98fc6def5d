"""What the workflows of a checkout start for an event, by GitHub's own packages."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from assay.errors import MachineError, UsageError, exit_in_words
from packages.runners.tests.github_parser.installing import BUNDLE, FOLDER, is_installed

WORKFLOWS = Path(".github/workflows")

# The exit code of evaluate.mjs where the input is at fault.
_REFUSED = 1
_TIMEOUT_SECONDS = 120
# What an expression of a workflow cannot do without.
_GITHUB = ("sha", "ref", "repository", "run_id")

Result = Literal["success", "failure", "cancelled", "skipped"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EventCase(_Model):
    """An event, and what is only known while its jobs run.

    event_name: as GITHUB_EVENT_NAME has it.
    event: the payload. That of a schedule has its `schedule`, that of a dispatch its `workflow`
        (".github/workflows/bench.yml") and its `inputs`.
    github: the rest of the `github` context: sha, ref, repository and run_id at least.
    vars: the variables of the repository.
    inputs: of a dispatch, beside those of the payload.
    outputs: by workflow, job and name. A job of a called workflow is named by the path of ids, as
        in "plan / plan"; the job that calls it, by its id, has the outputs of the workflow.
    results: by workflow and job; a job that runs and is not named here succeeds.
    changed: the files that `paths` filters; None where no workflow filters them.
    """

    name: str
    event_name: str
    event: dict[str, Any]
    github: dict[str, Any]
    vars: dict[str, str] = {}
    inputs: dict[str, str] = {}
    outputs: dict[str, dict[str, dict[str, str]]] = {}
    results: dict[str, dict[str, Result]] = {}
    changed: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _has_context(self) -> Self:
        missing = [name for name in _GITHUB if not self.github.get(name)]
        if missing:
            raise ValueError(f"github lacks {', '.join(missing)}")
        return self


class RunsOn(_Model):
    """Which runners take a job."""

    group: str | None
    labels: tuple[str, ...]


class Concurrency(_Model):
    """Jobs of one group do not run at the same time."""

    group: str
    cancel_in_progress: bool = Field(alias="cancel-in-progress")


class EvaluatedJob(_Model):
    """A job that runs, once for each combination of its matrix.

    workflow: the file name of the workflow that the event started.
    job: the id; of a job of a called workflow, the ids of all that call it first: "machines / run".
    name: the same path in the names that GitHub shows: "nvidia-4 / smoke".
    matrix, caller_matrix: the combination of the job, and that of the job that calls its workflow.
    inputs: of the dispatch, or of the called workflow.
    checkouts: the commit of each actions/checkout; "OWNER/NAME@REF" for another repository.
    permissions: what its token may do, without what is "none"; None is what the repository's
        settings say. Of a pull request from a fork nothing is "write".
    timeout_minutes: None is GitHub's own limit.
    condition: the text of `if`.
    """

    workflow: str
    job: str
    name: str
    matrix: dict[str, Any]
    caller_matrix: dict[str, Any]
    inputs: dict[str, str | bool | int | float]
    runs_on: RunsOn
    checkouts: tuple[str, ...]
    permissions: dict[str, Literal["read", "write"]] | None
    environment: str | None
    timeout_minutes: int | float | None
    concurrency: Concurrency | None
    condition: str | None = Field(alias="if")


class SkippedJob(_Model):
    """A job of a started workflow whose `if` does not hold, or that needs one which did not run."""

    workflow: str
    job: str


class FailedJob(_Model):
    """A job that GitHub fails before it has a runner, such as one with an empty matrix.

    job: "" where GitHub refuses the whole workflow.
    """

    workflow: str
    job: str
    message: str


class EvaluatedCase(_Model):
    """What an event starts.

    workflows: for each file of the repository, whether the event starts it.
    """

    name: str
    workflows: dict[str, bool]
    jobs: tuple[EvaluatedJob, ...]
    skipped: tuple[SkippedJob, ...]
    errors: tuple[FailedJob, ...]


_CASES = TypeAdapter(list[EvaluatedCase])


def evaluate(
    root: Path,
    cases: Sequence[EventCase],
    node: Path | None = None,
    *,
    reusable: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[EvaluatedCase]:
    """What each of `cases` starts, by the workflows below `root`.

    node: the program; None takes the first of the path.
    reusable: texts of called workflows that are not below `root`, by what `uses` says. Those of the
        repository itself are found there, whichever commit `uses` names.
    folder: where `installing` put the packages; None is where `nox -s runners` does.
    Returns: one for each case, in this order.
    Raises: UsageError if a workflow cannot be parsed, or a case names what no workflow has;
        MachineError if node or the packages are missing.
    """
    asked = {
        "workflows": read_workflows(root),
        "reusable": dict(reusable or {}),
        "cases": [case.model_dump(mode="json") for case in cases],
    }
    answer = _run(_find_node(node), _find_bundle(folder or root / FOLDER), json.dumps(asked))
    return _CASES.validate_python(json.loads(answer)["cases"])


def read_workflows(root: Path) -> dict[str, str]:
    """The texts of the workflows below `root`, by file name."""
    files = sorted(
        file for file in (root / WORKFLOWS).glob("*") if file.suffix in (".yml", ".yaml")
    )
    if not files:
        raise UsageError(f"{root / WORKFLOWS} has no workflow; name a checkout of assay")
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def _find_node(node: Path | None) -> Path:
    found = node or shutil.which("node")
    if found is None or not Path(found).is_file():
        raise MachineError(
            f"workflows are evaluated by node, and there is no {node or 'node on the path'}\n"
            "Next: nox -s runners, which brings it"
        )
    return Path(found)


def _find_bundle(folder: Path) -> Path:
    if not is_installed(folder):
        raise MachineError(
            f"{folder} lacks GitHub's packages, or has them for other sources than these\n"
            "Next: nox -s runners, which installs them"
        )
    return folder / BUNDLE


def _run(node: Path, bundle: Path, asked: str) -> str:
    try:
        ended = subprocess.run(
            [str(node), str(bundle)],
            input=asked,
            capture_output=True,
            encoding="utf-8",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{node} {bundle}: {error}") from error
    if ended.returncode == _REFUSED:
        raise UsageError(f"the workflows cannot be evaluated:\n{ended.stderr.strip()}")
    if ended.returncode != 0:
        raise MachineError(
            f"{node} {bundle} {exit_in_words(ended.returncode)}:\n{ended.stderr.strip()}"
        )
    return ended.stdout
