"""What the process of `assay check load` is asked for, and what it answers, as JSON."""

from typing import Any

from pydantic import Field

from assay.models.loaded.report import LoadReport
from assay.models.remote_code import RemoteCode
from assay.verdicts import Record


class LoadRequest(Record):
    """Load `model` on the device and in the dtype of `run`, and compare it with its files.

    run: None for the host, in the dtype that the files have.
    """

    model: str
    run: str | None = None
    remote_code: RemoteCode = "refuse"


class LoadAnswer(Record):
    """What was found; model, run: what the verdict says of them; notes: of loading itself."""

    report: LoadReport
    model: dict[str, Any]
    run: dict[str, Any]
    notes: list[str] = Field(default_factory=list)
