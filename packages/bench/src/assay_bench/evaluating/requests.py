"""The request to the evaluation process, and the layout of its folder."""

from pathlib import Path
from typing import Any

from pydantic import Field

from assay.models.remote_code import RemoteCode
from assay.verdicts import Record

DONE_FILE = "done.json"


class EvaluationRequest(Record):
    """A request to evaluate a model that assay loads."""

    model: str
    run: str
    tasks: list[str]
    """Tasks of the suite; for the process, those that have no results yet."""
    content: str = ""
    """Hash of the model's files, which `evaluate` adds; "" for a model on the hub."""
    fewshot: int | None = None
    limit: int | None = None
    """Number of documents of each task; None for all."""
    clusters: dict[str, str] = Field(default_factory=dict)
    setup: str | None = None
    """FILE.py:FUNC to call with the loaded model."""
    remote_code: RemoteCode = "refuse"
    folder: str
    """Folder of the run."""

    def key(self) -> dict[str, Any]:
        """Return the settings that must be equal to keep the results of an interrupted run."""
        return self.model_dump(mode="json", exclude={"folder", "tasks", "clusters"})


def task_folder(folder: Path, task: str) -> Path:
    """Return the folder of a task in the folder of a run."""
    return folder / "tasks" / (Path(task).stem if "/" in task else task)
