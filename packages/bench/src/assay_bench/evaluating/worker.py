"""The evaluation process: loads a model and runs lm-eval on it, task by task."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.files import seal, write_whole
from assay.models import load_model
from assay.models.candidate_setup import apply_setup
from assay.models.loading.configs import first_line
from assay.models.size_policy import choose_threads
from assay.plugins import load_object
from assay.progress import subtask
from assay.runs import Progress
from assay_bench.battery.task_files import load_task, make_task_error
from assay_bench.evaluating.requests import DONE_FILE, EvaluationRequest, task_folder

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

    from assay.devices.base import Device


def evaluate(options: EvaluationRequest, progress: Progress) -> None:
    """Write results and samples of every task."""
    progress.number_phases(3)
    with progress.step("loads lm-eval"):
        import lm_eval

        from assay_bench.evaluating.lm_eval_model import open_language_model

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run = parse_run(options.run)
    device = open_run(run)
    with progress.step(f"loads {options.model} on {run}"):
        loaded = load_model(
            options.model,
            dtype=run.dtype,
            device=device.torch_device,
            remote_code=options.remote_code,
        )
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
        if options.setup is not None:
            model = apply_setup(load_object(options.setup), loaded.model, options.setup)
            loaded = replace(loaded, model=model)
    facts = {
        "name": f"{options.model} on {options.run}",
        "model": options.model,
        "run": options.run,
        "setup": options.setup,
        "machine": f"{device.product()}, {torch.backends.cpu.get_cpu_capability()}",
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "versions": {"lm_eval": lm_eval.__version__} | dict(device.versions()),
        "clusters": options.clusters,
    }
    language_model = open_language_model(loaded, options)
    with progress.task(f"evaluates {options.model}", len(options.tasks), "tasks") as bar:
        for task in options.tasks:
            with subtask(task):
                _run_task(task, options, language_model, device, facts)
            bar.advance()


def _run_task(
    task: str,
    options: EvaluationRequest,
    language_model: "HFLM",
    device: "Device",
    facts: dict[str, Any],
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    folder = task_folder(Path(options.folder), task)
    config = load_task(task, folder / "documents")
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    with warnings.catch_warnings(), device.execution():
        warnings.simplefilter("ignore")  # libraries warn about each other
        with _one_line_errors(task):
            results: Any = simple_evaluate(
                model=language_model,
                tasks=[config],
                num_fewshot=options.fewshot,
                limit=options.limit,
                bootstrap_iters=0,
                evaluation_tracker=tracker,
            )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results | {"assay": facts}, samples=samples)
    for name in samples:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if not any(folder.glob("results_*.json")):
        # lm-eval only logs that it could not write.
        raise MachineError(f"lm-eval could not write its results into {folder}")
    write_whole(folder / DONE_FILE, seal(options.key()))


@contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    """Raise UsageError for a task that lm-eval does not know or cannot download."""
    try:
        yield
    except KeyError as error:
        if "not a registered" not in str(error):
            raise
        raise make_task_error(
            task, "lm-eval does not know this task; `lm-eval ls tasks` lists all tasks"
        ) from None
    except (ConnectionError, FileNotFoundError) as error:
        raise make_task_error(
            task,
            f"its documents are on the Hugging Face hub, which cannot be reached ({first_line(error)}):"
            " run it once on a machine with network access and an HF_HOME that this machine shares, or"
            " use --suite offline",
        ) from None
