"""Suites: tasks and the terms of their comparison."""

import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field

from assay.errors import UsageError
from assay.files import read_toml_record
from assay.verdicts import Record
from assay_bench.comparing.terms import Terms

_SUITES = Path(str(files("assay_bench") / "battery" / "suites"))


class TaskSuite(Record):
    """A suite of tasks."""

    tasks: list[str] = Field(min_length=1)
    """Names of offline tasks or of lm-eval, or YAML files in the folder of the suite."""
    clusters: dict[str, str] = Field(default_factory=dict)
    """For each task, the document field that names the cluster."""
    fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; None for the default of each task."""
    terms: Terms = Field(default_factory=Terms)


def read_suite(name: str) -> TaskSuite:
    """Read a shipped suite by its name, or FILE.toml.

    Raises: UsageError with the file, the key and the expected value.
    """
    path = Path(name) if name.endswith(".toml") else _SUITES / f"{name}.toml"
    if not path.exists():
        shipped = ", ".join(sorted(path.stem for path in _SUITES.glob("*.toml")))
        raise UsageError(f"suite {name} does not exist; shipped suites: {shipped}")
    suite = read_toml_record(TaskSuite, path)
    tasks = [
        os.path.realpath(path.parent / task) if task.endswith((".yaml", ".yml")) else task
        for task in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tasks})
