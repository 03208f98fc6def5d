"""Keep the verdicts and the measurements of trials, so that a later commit can be held to them."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from assay.files import write_whole
from assay.runs import results
from assay.verdicts import Verdict

Task = TypeVar("Task")
Result = TypeVar("Result")

FOLDER = "ASSAY_KEEP_TRIALS"
"""The environment variable that names the folder for files of kept trials."""
# Folders of a pytest session and of an environment: other ones in every run.
_PATHS = re.compile(r"/[^\s'\"():,]*/(pytest-of-\w+/pytest-\d+|site-packages|packages)/")
_SECONDS = re.compile(r"\b\d+(\.\d+)? (ms|s|min)\b")
# They tell of the machine and the moment.
_LEFT_OUT = {"command", "environment", "files"}


def kept_if_asked(work: Callable[[Task], Result]) -> Callable[[Task], Result]:
    """Return `work`, which also keeps its trials if the environment names a folder."""
    folder = os.environ.get(FOLDER)
    return Kept(work, Path(folder)) if folder else work


@dataclass(frozen=True)
class Kept(Generic[Task, Result]):
    """`work` that appends a line for each task to a file in `folder`, one file for each process."""

    work: Callable[[Task], Result]
    folder: Path

    def __call__(self, task: Task) -> Result:
        """Do the work of a task."""
        digests: list[str] = []
        write = partial(_write_and_keep, digests)
        with patch.object(results, "write_whole", write):
            result = self.work(task)
        line = {
            "task": f"{self.work.__module__}.{self.work.__name__} {without_paths(repr(task))}",
            "verdicts": [comparable(verdict) for verdict in _verdicts_in(result)],
            "measurements": digests,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result


def comparable(verdict: Verdict) -> dict[str, Any]:
    """Return the content of a verdict without times, paths and environment."""
    content = json.loads(without_paths(verdict.to_json()))
    return {key: value for key, value in content.items() if key not in _LEFT_OUT}


def without_paths(text: str) -> str:
    """Replace folders that differ in every run, and durations."""
    return _SECONDS.sub("TIME", _PATHS.sub("PATH/", text))


def _write_and_keep(digests: list[str], path: Path, content: Iterable[str]) -> Path:
    text = "".join(content)
    if path.name == results.MEASUREMENTS_FILE:
        digests.append(sha256(text.encode()).hexdigest())
    return write_whole(path, text)


def _verdicts_in(result: object) -> Iterator[Verdict]:
    if isinstance(result, Verdict):
        yield result
    elif is_dataclass(result):
        for one in fields(result):
            yield from _verdicts_in(getattr(result, one.name))
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _verdicts_in(item)
    elif isinstance(result, Mapping):
        yield from _verdicts_in(list(result.values()))
