"""Tasks of lm-eval that need no network: a YAML file over local JSON."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash
import yaml

from assay.errors import UsageError
from assay.inputs import built_in_texts
from assay_bench.documents import next_text_documents

NEXT_TEXT = "next-text"

# Metrics of lm-eval that are 1 or 0 for each document of a multiple choice: what is compared.
_METRICS = ("acc", "acc_norm", "acc_bytes", "exact_match")


class TaskError(UsageError):
    """A task that cannot be run here."""

    @classmethod
    def of(cls, task: str, problem: str) -> "TaskError":
        """What is wrong with it."""
        return cls(f"task {task}: {problem}")


def load_task(task: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The configuration of `task`, a name of ours or a YAML file, and a hash of all it asks.

    folder: gets the documents of a task that makes its own.
    Raises: TaskError if it is none, or needs more than local JSON and log-likelihoods.
    """
    if task == NEXT_TEXT:
        text = (files("assay_bench") / "tasks" / f"{task}.yaml").read_text(encoding="utf-8")
        documents = folder / "documents.jsonl"
        lines = (json.dumps(document) for document in next_text_documents(built_in_texts()))
        documents.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        config = _parse(task, text) | {"dataset_kwargs": {"data_files": {"test": str(documents)}}}
        return config, _hash(text, [documents])
    path = Path(task)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise TaskError.of(task, f"there is no such file, and no task of that name but {NEXT_TEXT}")
    text = path.read_text(encoding="utf-8")
    config = _parse(task, text)
    data_files = _data_files(task, config, path.parent)
    config["dataset_kwargs"] = {"data_files": {name: str(f) for name, f in data_files.items()}}
    return config, _hash(text, [data_files[name] for name in sorted(data_files)])


def has_documents(config: dict[str, Any]) -> bool:
    """Whether the split that lm-eval evaluates has any; the loader of JSON fails where none is.

    config: what `load_task` gave.
    """
    files = config["dataset_kwargs"]["data_files"]
    split = config.get("test_split") or config.get("validation_split")
    text = Path(files[split]).read_text(encoding="utf-8")
    return text.strip() not in ("", "[]")


def _parse(task: str, text: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TaskError.of(task, f"not YAML without tags: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise TaskError.of(task, "needs a name under the key task")
    wanted = {"dataset_path": "json", "output_type": "multiple_choice"}
    for key, value in wanted.items():
        if config.get(key) != value:
            raise TaskError.of(task, f"{key} is {config.get(key)!r}; only {value!r} is possible")
    metrics = config.get("metric_list")
    first = metrics[0] if isinstance(metrics, list) and metrics else None
    if not isinstance(first, dict) or first.get("metric") not in _METRICS:
        raise TaskError.of(task, f"needs metric_list: [{{metric: {' | '.join(_METRICS)}}}]")
    return config


def _data_files(task: str, config: dict[str, Any], base: Path) -> dict[str, Path]:
    named = (config.get("dataset_kwargs") or {}).get("data_files")
    if not isinstance(named, dict) or not named:
        raise TaskError.of(task, "needs dataset_kwargs: data_files: {test: FILE.jsonl}")
    found = {str(split): base / str(file) for split, file in named.items()}
    for file in found.values():
        if not file.is_file():
            raise TaskError.of(task, f"there is no file {file}")
    split = config.get("test_split") or config.get("validation_split")
    if split not in found:
        raise TaskError.of(task, f"needs test_split: one of {', '.join(sorted(found))}")
    return found


def _hash(text: str, documents: list[Path]) -> str:
    digest = xxhash.xxh3_128(text.encode())
    for file in documents:
        digest.update(file.read_bytes())
    return digest.hexdigest()
