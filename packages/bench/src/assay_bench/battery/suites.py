"""Suites: which tasks are asked, and what a candidate is held to."""

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
    """A battery of tasks.

    tasks: shipped ones by name, FILE.yaml beside the suite, or what lm-eval knows by name.
    clusters: by task, the field of its documents that says what belongs together.
    fewshot: examples before each question; None for what each task says.
    """

    tasks: list[str] = Field(min_length=1)
    clusters: dict[str, str] = Field(default_factory=dict)
    fewshot: Annotated[int, Field(ge=0)] | None = None
    terms: Terms = Field(default_factory=Terms)


def shipped_suites() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in _SUITES.glob("*.toml"))


def read_suite(name: str) -> TaskSuite:
    """Read a shipped suite by its name, or FILE.toml; its YAML files lie in the same folder.

    Raises: UsageError with the file, the key and the expected value.
    """
    path = Path(name) if name.endswith(".toml") else _SUITES / f"{name}.toml"
    if not path.exists():
        shipped = ", ".join(shipped_suites())
        raise UsageError(f"suite {name} does not exist; shipped suites: {shipped}")
    suite = read_toml_record(TaskSuite, path)
    found = [_beside(path, task) for task in suite.tasks]
    return suite.model_copy(update={"tasks": found})


def _beside(suite: Path, task: str) -> str:
    return os.path.realpath(suite.parent / task) if task.endswith((".yaml", ".yml")) else task
