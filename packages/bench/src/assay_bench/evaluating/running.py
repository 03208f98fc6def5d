"""Evaluations in a folder: by our own process, or by lm-eval's command line with any backend."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import (
    content_digest,
    file_digest,
    read_json_object,
    read_sealed_json,
    refuse_link,
    write_whole,
)
from assay.launch import ProcessError, RemoteFunction, call
from assay.models.sources import ModelSource, RemoteCode, local_folder, resolve_model
from assay.runs import Progress
from assay.runs.provenance import redact
from assay.verdicts import Record
from assay.watchdog import temporary_folder
from assay_bench.battery.suites import TaskSuite, load_task
from assay_bench.evaluations.reading import newest_results, write_manifest

DONE_FILE = "done.json"


class EvaluationRequest(Record):
    """A request to evaluate a model that assay loads."""

    model: str
    run: str
    suite: TaskSuite
    """For the process, with the tasks that have no results yet."""
    content: str = ""
    """Hash of the model's files, which `evaluate` adds; "" for a model on the hub."""
    limit: int | None = None
    """Number of documents of each task; None for all."""
    setup: str | None = None
    """FILE.py:FUNC to call with the loaded model."""
    remote_code: RemoteCode = "refuse"
    folder: Path
    """Folder of the run."""

    def key(self) -> dict[str, Any]:
        """Return the settings that must be equal to keep the results of an interrupted run."""
        kept = self.model_dump(mode="json", exclude={"folder", "suite"})
        return kept | {"fewshot": self.suite.fewshot}


def task_folder(folder: Path, task: str) -> Path:
    """Return the folder of a task in the folder of a run."""
    return folder / "tasks" / (Path(task).stem if "/" in task else task)


_WORK: RemoteFunction[EvaluationRequest, None] = RemoteFunction(
    "assay_bench.evaluating.worker:evaluate"
)


def evaluate(request: EvaluationRequest, progress: Progress) -> None:
    """Run every task of `request` that has no results in its folder with the same settings.

    Raises: UsageError, MachineError or ProcessError.
    """
    folder, tasks = request.folder, request.suite.tasks
    parse_run(request.run)
    source = resolve_model(request.model)
    content = _content_of(source, request.remote_code)
    request = request.model_copy(update={"content": content})
    remaining = [task for task in tasks if not _is_done(task_folder(folder, task), request)]
    if remaining:
        with temporary_folder("assay-bench-") as cache:
            environment = {"HF_DATASETS_CACHE": str(cache), "TQDM_DISABLE": "1"}
            if source.kind != "hub" and _are_local(remaining):
                environment["HF_HUB_OFFLINE"] = "1"
            suite = request.suite.model_copy(update={"tasks": remaining})
            request = request.model_copy(update={"suite": suite})
            call(
                _WORK,
                request,
                folder=folder,
                name="evaluation",
                progress=progress,
                environment=environment,
            )
    write_manifest(folder, {one: newest_results(task_folder(folder, one)) for one in tasks})


def _are_local(tasks: list[str]) -> bool:
    from assay_bench.battery.documents import TASKS

    return all(task in TASKS or task.endswith((".yaml", ".yml")) for task in tasks)


def _is_done(folder: Path, request: EvaluationRequest) -> bool:
    """Return True for results with the same settings; remove any others."""
    done = folder / DONE_FILE
    if done.is_file() and read_sealed_json(refuse_link(done)) == request.key():
        return True
    for file in (*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl"), done):
        file.unlink(missing_ok=True)
    return False


def _content_of(source: ModelSource, remote_code: RemoteCode) -> str:
    """Hash the model's files; return "" for a model on the hub, which is not opened."""
    if source.kind == "hub":
        return ""
    with local_folder(source, remote_code) as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return content_digest({str(file.relative_to(folder)): file_digest(file) for file in files})


@dataclass(frozen=True, slots=True)
class Backend:
    """A model class of lm-eval, such as hf, vllm or local-completions, with its arguments."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """Copies of the model that share the documents, started by `accelerate launch`."""


def command_line(backend: Backend, suite: TaskSuite, limit: int | None, folder: Path) -> list[str]:
    """Write the task files into `folder` and return the command.

    Raises: UsageError for arguments that lm-eval would split.
    """
    names = [_task_name(task, folder) for task in suite.tasks]
    for key, value in backend.arguments.items():
        if "," in value:
            raise UsageError(f"--model-args {key}={value}: lm-eval splits its arguments at commas")
    arguments = ",".join(f"{key}={value}" for key, value in backend.arguments.items())
    start = [sys.executable, "-m"]
    if backend.processes > 1:
        start += ["accelerate.commands.launch", "--num_processes", str(backend.processes), "-m"]
    words = [*start, "lm_eval", "run", "--model", backend.name, "--tasks", ",".join(names)]
    words += ["--model_args", arguments] if arguments else []
    words += ["--include_path", str(_task_files(folder)), "--output_path", str(folder / "lm-eval")]
    words += [] if suite.fewshot is None else ["--num_fewshot", str(suite.fewshot)]
    words += [] if limit is None else ["--limit", str(limit)]
    return [*words, "--log_samples"]


def run_command_line(
    backend: Backend, suite: TaskSuite, limit: int | None, folder: Path, progress: Progress
) -> None:
    """Run lm-eval, with its output in `folder`/lm-eval.log, and write the manifest of its results.

    Raises: ProcessError with the end of the output if lm-eval fails.
    """
    folder = folder.resolve()  # lm-eval runs in this folder
    words = command_line(backend, suite, limit, folder)
    log = folder / "lm-eval.log"
    progress.note(f"output of lm-eval: {log}")
    with (
        progress.step(f"evaluates {backend.name} with lm-eval"),
        log.open("w", encoding="utf-8") as output,
    ):
        done = subprocess.run(words, stdout=output, stderr=output, check=False, cwd=folder)
    if done.returncode:
        raise ProcessError.died("lm-eval", done.returncode, log)
    for results in folder.rglob("results_*.json"):
        _hide_secrets(results)
    write_manifest(folder, {backend.name: newest_results(folder)})


def _hide_secrets(results: Path) -> None:
    """Hide secrets in the model arguments that lm-eval writes into its results."""
    content = read_json_object(results)
    config = content.get("config")
    if isinstance(config, dict) and "model_args" in config:
        config["model_args"] = _hidden(config["model_args"])
        write_whole(results, json.dumps(content, indent=2, ensure_ascii=False))


def _hidden(arguments: object) -> object:
    if isinstance(arguments, dict):
        pairs = redact([f"{name}={value}" for name, value in arguments.items()])
        return {
            name: value if pair.endswith(f"={value}") else pair.partition("=")[2]
            for (name, value), pair in zip(arguments.items(), pairs, strict=True)
        }
    return redact([arguments])[0] if isinstance(arguments, str) else arguments


def _task_files(folder: Path) -> Path:
    return folder / "task-files"


def _task_name(task: str, folder: Path) -> str:
    """Return lm-eval's name of a task, after writing its task file if it has one."""
    config = load_task(task, _task_files(folder) / "documents")
    _task_files(folder).mkdir(parents=True, exist_ok=True)
    if isinstance(config, str):
        return config
    name = str(config["task"])
    (_task_files(folder) / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return name


def parse_backend(name: str | None, arguments: list[str], processes: int) -> Backend | None:
    """Parse the options of a backend; return None without --model-backend.

    Raises: UsageError for options that need a backend, or arguments that are not KEY=VALUE.
    """
    if name is None:
        if arguments or processes > 1:
            raise UsageError(
                "--model-args and --processes need --model-backend, such as --model-backend hf"
            )
        return None
    pairs = {}
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--model-args {text}: expected one KEY=VALUE")
        pairs[key] = value
    if processes > 1 and pairs.get("device", "").startswith("cpu"):
        raise UsageError(
            "--processes needs accelerators: on a CPU, `accelerate launch` always starts one process"
        )
    return Backend(name, pairs, processes)
