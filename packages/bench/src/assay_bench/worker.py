"""The process that loads a model and evaluates it through lm-eval as a library."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.models import load_model
from assay.models.size_policy import choose_threads
from assay.runs import Progress
from assay.runs.worker import serve
from assay_bench.results import BenchResult, EvaluationRequest
from assay_bench.task_files import has_documents, load_task

if TYPE_CHECKING:
    from assay_bench.language_model import AssayLM


@dataclass(frozen=True, slots=True)
class _Answers:
    """What lm-eval found; of no document, nothing."""

    score: float = math.nan
    standard_error: float = math.nan
    chance: float = math.nan
    right: list[bool] = field(default_factory=list)


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer an EvaluationRequest with a BenchResult."""
    asked = EvaluationRequest.model_validate(request)
    return evaluate(asked, progress).model_dump(mode="json", by_alias=True)


def evaluate(asked: EvaluationRequest, progress: Progress) -> BenchResult:
    """Run one task."""
    config, task_hash = load_task(asked.task, Path(asked.folder))
    with progress.step("loads lm-eval"):
        import lm_eval

        from assay_bench.language_model import AssayLM

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run = parse_run(asked.run)
    device = open_run(run)
    with progress.step(f"loads {asked.model} on {run}"):
        loaded = load_model(
            asked.model,
            dtype=run.dtype,
            device=device.torch_device,
            remote_code=asked.remote_code,
        )
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    language_model = AssayLM(loaded, device)
    answers = _Answers()
    if has_documents(config):
        with progress.step(f"evaluates {config['task']}"):
            answers = _evaluate(config, language_model)
    return BenchResult(
        schema=1,
        task=config["task"],
        task_hash=task_hash,
        model=asked.model,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        run=asked.run,
        metric=_metric(config),
        score=answers.score,
        standard_error=answers.standard_error,
        chance=answers.chance,
        right=answers.right,
        num_non_finite=language_model.num_non_finite,
        versions={"lm_eval": lm_eval.__version__} | dict(device.versions()),
    )


def _evaluate(config: dict[str, Any], language_model: "AssayLM") -> _Answers:
    from lm_eval import simple_evaluate

    results = simple_evaluate(model=language_model, tasks=[config])
    if results is None:
        raise MachineError("lm-eval gave no result")
    name, metric = config["task"], _metric(config)
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    scores = results["results"][name]
    # "N/A" for a single document, which spreads nothing.
    error = scores[f"{metric}_stderr,none"]
    return _Answers(
        score=scores[f"{metric},none"],
        standard_error=error if isinstance(error, float) else math.nan,
        chance=sum(1 / len(sample["resps"]) for sample in samples) / len(samples),
        right=[sample[metric] == 1 for sample in samples],
    )


def _metric(config: dict[str, Any]) -> str:
    name: str = config["metric_list"][0]["metric"]
    return name


if __name__ == "__main__":
    serve(work)
