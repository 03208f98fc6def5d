"""Runs of lm-eval's own command line, with any backend, data-parallel by accelerate."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from assay.errors import MachineError, UsageError
from assay.files import read_json_object, write_whole
from assay.runs import Progress
from assay.runs.provenance import redact
from assay_bench.battery.suites import TaskSuite
from assay_bench.battery.task_files import load_task

_TAIL_LINES = 15


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
    """Run lm-eval, with its output in `folder`/lm-eval.log.

    Raises: MachineError with the end of the output if lm-eval fails.
    """
    import subprocess

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
        tail = "\n".join(
            log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        )
        raise MachineError(
            f"lm-eval failed with exit code {done.returncode}; end of {log}:\n{tail}"
        )
    for results in folder.rglob("results_*.json"):
        _hide_secrets(results)


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
