"""The process that loads a model and evaluates it through lm-eval as a library."""

import logging
from pathlib import Path
from typing import Any

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.generate.options import choose_threads
from assay.models import load_model
from assay.runs import Progress
from assay.runs.worker import serve
from assay_bench.results import BenchResult, EvaluationRequest
from assay_bench.task_files import load_task


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer an EvaluationRequest with a BenchResult."""
    asked = EvaluationRequest.model_validate(request)
    return evaluate(asked, progress).model_dump(mode="json", by_alias=True)


def evaluate(asked: EvaluationRequest, progress: Progress) -> BenchResult:
    """Run one task."""
    config, task_hash = load_task(asked.task, Path(asked.folder))
    with progress.step("loads lm-eval"):
        import lm_eval
        from lm_eval import simple_evaluate

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
    with progress.step(f"evaluates {config['task']}"):
        results = simple_evaluate(model=language_model, tasks=[config])
    if results is None:
        raise MachineError("lm-eval gave no result")
    name = config["task"]
    metric = config["metric_list"][0]["metric"]
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    scores = results["results"][name]
    return BenchResult(
        schema=1,
        task=name,
        task_hash=task_hash,
        model=asked.model,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        run=asked.run,
        metric=metric,
        score=scores[f"{metric},none"],
        standard_error=scores[f"{metric}_stderr,none"],
        chance=sum(1 / len(sample["resps"]) for sample in samples) / len(samples),
        right=[sample[metric] == 1 for sample in samples],
        num_non_finite=language_model.num_non_finite,
        versions={"lm_eval": lm_eval.__version__} | dict(device.versions()),
    )


if __name__ == "__main__":
    serve(work)
