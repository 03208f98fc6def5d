"""Suites: tasks and the terms of their comparison; and the configurations of their tasks for lm-eval."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from assay.errors import UsageError
from assay.files import UnreadableFileError, open_file, read_text, read_toml_record
from assay.verdicts import Record
from assay_bench.battery.documents import TASKS, documents_of
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


# yaml reads about 100 KB/s.
_MAX_BYTES = 1 << 19
_NUM_FIRST_BYTES = 1 << 10

_FOLDER = Path(str(files("assay_bench") / "battery" / "tasks"))


def make_task_error(task: str, problem: str) -> UsageError:
    """Make the error for a task."""
    return UsageError(f"task {task}: {problem}")


def load_task(task: str, folder: Path) -> str | dict[str, Any]:
    """Return the configuration of an offline task or a YAML file; return any other name unchanged.

    folder: the documents of an offline task are written there.
    Raises: UsageError for an invalid file, or without the local documents that it names.
    """
    if task in TASKS:
        documents = folder / f"{task}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(document) + "\n" for document in documents_of(task))
        documents.write_text("".join(lines), encoding="utf-8")
        return _parse(_FOLDER / f"{task}.yaml") | {
            "dataset_kwargs": {"data_files": {"test": str(documents)}}
        }
    if not task.endswith((".yaml", ".yml")):
        return task
    config = _parse(Path(task))
    if config.get("dataset_path") == "json":
        found = _data_files(Path(task), config)
        config["dataset_kwargs"] = {"data_files": {name: str(file) for name, file in found.items()}}
    return config


def _parse(path: Path) -> dict[str, Any]:
    text = read_text(path, _MAX_BYTES)
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableFileError.of(path, f"not plain YAML: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise make_task_error(str(path), "the key task must hold a name")
    if Path(config["task"]).name != config["task"]:
        raise make_task_error(
            str(path),
            "the name under the key task must not contain /, because it becomes a file name",
        )
    return config


def _data_files(path: Path, config: dict[str, Any]) -> dict[str, Path]:
    """Return the document files that a task file names, relative to its folder."""
    settings = config.get("dataset_kwargs")
    named = settings.get("data_files") if isinstance(settings, dict) else None
    if not isinstance(named, dict) or not named:
        raise make_task_error(str(path), "expected dataset_kwargs: data_files: {test: FILE.jsonl}")
    found = {str(split): path.parent / str(file) for split, file in named.items()}
    for file in found.values():
        with open_file(file) as documents:
            beginning = documents.read(_NUM_FIRST_BYTES)
        if not beginning.strip(b" []\n"):
            raise make_task_error(str(path), f"{file} has no documents")
    return found
