"""Tasks as lm-eval takes them: shipped ones with their documents, YAML files, names that it knows."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from assay.errors import UsageError
from assay.files import UnreadableFileError, open_file, read_text
from assay_bench.battery.documents import TASKS, documents_of

# yaml reads about 100 KB/s.
_MOST_BYTES = 1 << 19
_BEGINNING = 1 << 10

_FOLDER = Path(str(files("assay_bench") / "battery" / "tasks"))


class TaskError(UsageError):
    """A task that cannot be run here."""

    @classmethod
    def of(cls, task: str, problem: str) -> "TaskError":
        """What is wrong with it."""
        return cls(f"task {task}: {problem}")


def load_task(task: str, folder: Path) -> str | dict[str, Any]:
    """The configuration of a shipped task or a YAML file; any other name as it is, for lm-eval to find.

    folder: gets the documents of a shipped task.
    Raises: TaskError for a file that is none, or without the local documents that it names.
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
    text = read_text(path, _MOST_BYTES)
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableFileError.of(path, f"not YAML without tags: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise TaskError.of(str(path), "needs a name under the key task")
    if Path(config["task"]).name != config["task"]:
        raise TaskError.of(str(path), "the name under the key task becomes a file name: no /")
    return config


def _data_files(path: Path, config: dict[str, Any]) -> dict[str, Path]:
    """The documents that the file names, found beside it."""
    settings = config.get("dataset_kwargs")
    named = settings.get("data_files") if isinstance(settings, dict) else None
    if not isinstance(named, dict) or not named:
        raise TaskError.of(str(path), "needs dataset_kwargs: data_files: {test: FILE.jsonl}")
    found = {str(split): path.parent / str(file) for split, file in named.items()}
    for file in found.values():
        with open_file(file) as documents:
            beginning = documents.read(_BEGINNING)
        if not beginning.strip(b" []\n"):
            raise TaskError.of(str(path), f"there are no documents in {file}")
    return found
