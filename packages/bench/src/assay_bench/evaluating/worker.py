"""The process that loads a model and has lm-eval ask it, task by task."""

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
from assay.runs.worker import serve
from assay_bench.battery.task_files import TaskError, load_task
from assay_bench.evaluating.lm_eval_model import open_language_model
from assay_bench.evaluating.requests import DONE_FILE, EvaluationRequest, task_folder

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

    from assay.devices.base import Device


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer an EvaluationRequest: results and samples of every task lie in its folder."""
    asked = EvaluationRequest.model_validate(request)
    progress.number_phases(3)
    with progress.step("loads lm-eval"):
        import lm_eval

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run = parse_run(asked.run)
    device = open_run(run)
    with progress.step(f"loads {asked.model} on {run}"):
        loaded = load_model(
            asked.model, dtype=run.dtype, device=device.torch_device, remote_code=asked.remote_code
        )
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
        if asked.setup is not None:
            model = apply_setup(load_object(asked.setup), loaded.model, asked.setup)
            loaded = replace(loaded, model=model)
    facts = {
        "name": f"{asked.model} on {asked.run}",
        "model": asked.model,
        "run": asked.run,
        "setup": asked.setup,
        "machine": f"{device.product()}, {torch.backends.cpu.get_cpu_capability()}",
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "versions": {"lm_eval": lm_eval.__version__} | dict(device.versions()),
        "clusters": asked.clusters,
    }
    language_model = open_language_model(loaded, asked)
    with progress.task(f"asks {asked.model}", len(asked.tasks), "tasks") as bar:
        for task in asked.tasks:
            with subtask(task):
                _ask(task, asked, language_model, device, facts)
            bar.advance()
    return {"facts": facts}


def _ask(
    task: str,
    asked: EvaluationRequest,
    language_model: "HFLM",
    device: "Device",
    facts: dict[str, Any],
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    folder = task_folder(Path(asked.folder), task)
    config = load_task(task, folder / "documents")
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    with warnings.catch_warnings(), device.execution():
        warnings.simplefilter("ignore")  # of libraries, about how they call each other
        with _told_in_a_line(task):
            results: Any = simple_evaluate(
                model=language_model,
                tasks=[config],
                num_fewshot=asked.fewshot,
                limit=asked.limit,
                bootstrap_iters=0,
                evaluation_tracker=tracker,
            )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results | {"assay": facts}, samples=samples)
    for name in samples:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if not any(folder.glob("results_*.json")):
        # Whatever keeps lm-eval from writing, it goes on.
        raise MachineError(f"lm-eval could not write its results into {folder}")
    write_whole(folder / DONE_FILE, seal(asked.key()))


@contextmanager
def _told_in_a_line(task: str) -> Iterator[None]:
    """Raises: TaskError for a name that lm-eval does not know, or documents that it cannot get."""
    try:
        yield
    except KeyError as error:
        if "not a registered" not in str(error):
            raise
        raise TaskError.of(
            task, "lm-eval knows no such task; `lm-eval ls tasks` lists all"
        ) from None
    except (ConnectionError, FileNotFoundError) as error:
        raise TaskError.of(
            task,
            f"its documents are on the hub of Hugging Face, and that cannot be reached"
            f" ({first_line(error)}): ask it once where there is a network, with HF_HOME on a disk that"
            " is seen here, or take --suite offline",
        ) from None


if __name__ == "__main__":
    serve(work)
