"""What the process that evaluates is asked for, and what it leaves in the folder of a run."""

from pathlib import Path
from typing import Any

from pydantic import Field

from assay.models.remote_code import RemoteCode
from assay.verdicts import Record

DONE_FILE = "done.json"


class EvaluationRequest(Record):
    """Ask a model that assay loads.

    tasks: as in a suite. content: hash of the model's files; "" for what has none here.
    setup: FILE.py:FUNC, called with the loaded model.
    fewshot: examples before each question; None for what each task says.
    limit: the first so many documents; None for all.
    clusters: as in a suite. folder: of the run.
    """

    model: str
    run: str
    tasks: list[str]
    content: str
    fewshot: int | None = None
    limit: int | None = None
    clusters: dict[str, str] = Field(default_factory=dict)
    setup: str | None = None
    remote_code: RemoteCode = "refuse"
    folder: str

    def key(self) -> dict[str, Any]:
        """What has to be the same for the results of an earlier run to be those of this one."""
        return self.model_dump(mode="json", exclude={"folder", "tasks", "clusters"})


def task_folder(folder: Path, task: str) -> Path:
    """Where the files of a task lie in the folder of a run."""
    return folder / "tasks" / (Path(task).stem if "/" in task else task)
