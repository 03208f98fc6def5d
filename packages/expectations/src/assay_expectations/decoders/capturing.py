"""Captures references and metrics of a trusted device, from which thresholds are calibrated."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from assay.comparing.token_thresholds import PUBLISHED_METRICS
from assay.errors import UsageError
from assay.files import write_whole
from assay.inputs import built_in_texts
from assay.runs import Progress
from assay.runs.results import read_measurements
from assay.verdicts import Outcome
from assay.watchdog import temporary_folder
from assay_expectations.decoders.checking import DecoderCheck
from assay_expectations.decoders.options import DecoderOptions, Shape
from assay_expectations.records import require_writable

REFERENCES, METRICS = "references", "metrics"


def capture_metrics(
    model: str,
    run: str,
    shapes: Sequence[Shape],
    num_seeds: int,
    output: Path,
    progress: Progress,
) -> Iterator[Path]:
    """Write references and metrics into two folders of `output`. Yield each finished file of metrics.

    num_seeds: sets of prompts per shape.
    Raises: UsageError if `run` does not pass the ladder, or if there are too few texts for the prompts.
    """
    num_texts = len(built_in_texts())
    for shape in shapes:
        if num_seeds * shape.batch_size > num_texts:
            raise UsageError(
                f"--seeds {num_seeds} with shape {shape}: the {num_texts} texts are too few, two"
                " sets would have equal prompts"
            )
    require_writable(output)
    options = DecoderOptions(references=output / REFERENCES)
    trials = list(product(shapes, range(num_seeds)))
    with progress.task(f"{model} on {run}", len(trials)) as task:
        for shape, seed in trials:
            with temporary_folder("assay-metrics-") as scratch:
                check = DecoderCheck(model, shape, run, scratch, replace(options, seed=seed))
                verdict = check.run(progress)
                if verdict.verdict is not Outcome.PASS:
                    raise UsageError(
                        f"{run} cannot be trusted: {model} with shape {shape} is"
                        f" {verdict.verdict.value} against cpu/float32. To reproduce: pytest --pyargs"
                        f" assay_expectations.suites -k decoders --decoder-model {model}"
                        f" --decoder-shape {shape} --assay-device {run}"
                    )
                yield _keep_metrics(check, f"{shape}-seed{seed}", output / METRICS)
            task.advance()


def _keep_metrics(check: DecoderCheck, name: str, folder: Path) -> Path:
    """Write the published metrics of a check to a file."""
    rows, _ = read_measurements(check.results)
    kept = [row.model_dump_json() for row in rows if row.statistic in PUBLISHED_METRICS]
    owner = "-".join(f"{check.model}-{check.candidate}".replace(":", "/").split("/"))
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(folder / f"{owner}-{name}.jsonl", "\n".join(kept) + "\n")
