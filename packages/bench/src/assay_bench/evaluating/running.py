"""Evaluations in a folder: skips finished tasks and starts a process for the others."""

from dataclasses import dataclass
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.files import content_digest, file_digest, read_sealed_json, refuse_link
from assay.models.folders import local_folder
from assay.models.remote_code import RemoteCode
from assay.models.sources import ModelSource, resolve_model
from assay.runs import Progress, Work, ask
from assay.watchdog import temporary_folder
from assay_bench.battery.suites import TaskSuite
from assay_bench.evaluating.command_line import Backend, run_command_line
from assay_bench.evaluating.requests import DONE_FILE, EvaluationRequest, task_folder
from assay_bench.evaluations.reading import newest_results, write_manifest

_WORK: Work[EvaluationRequest, None] = Work("assay_bench.evaluating.worker:evaluate")


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The model, the tasks, and how to run them."""

    model: str
    run: str
    suite: TaskSuite
    limit: int | None = None
    """Number of documents of each task; None for all."""
    setup: str | None = None
    """FILE.py:FUNC to call with the loaded model."""
    remote_code: RemoteCode = "refuse"
    backend: Backend | None = None
    """A model class of lm-eval that replaces `model` and `run`."""


def evaluate(options: EvaluationOptions, folder: Path, progress: Progress) -> Path:
    """Run every task that has no results in `folder` with the same settings. Returns: the folder.

    Raises: UsageError, MachineError or ProcessError.
    """
    suite = options.suite
    if options.backend is not None:
        run_command_line(options.backend, suite, options.limit, folder, progress)
        write_manifest(folder, {options.backend.name: newest_results(folder)})
        return folder
    parse_run(options.run)
    source = resolve_model(options.model)
    request = EvaluationRequest(
        model=options.model,
        run=options.run,
        tasks=suite.tasks,
        content=_content_of(source, options.remote_code),
        fewshot=suite.fewshot,
        limit=options.limit,
        clusters=suite.clusters,
        setup=options.setup,
        remote_code=options.remote_code,
        folder=str(folder.resolve()),
    )
    remaining = [task for task in suite.tasks if not _is_done(task_folder(folder, task), request)]
    if remaining:
        with temporary_folder("assay-bench-") as cache:
            environment = {"HF_DATASETS_CACHE": str(cache), "TQDM_DISABLE": "1"}
            if source.kind != "hub" and _are_local(remaining):
                environment["HF_HUB_OFFLINE"] = "1"
            ask(
                _WORK,
                request.model_copy(update={"tasks": remaining}),
                folder,
                name="evaluation",
                progress=progress,
                environment=environment,
            )
    found = {task: max(task_folder(folder, task).glob("results_*.json")) for task in suite.tasks}
    write_manifest(folder, found)
    return folder


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
