"""Captures references and metrics of a trusted device, from which thresholds are calibrated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from assay_expectations.decoders.options import DecoderOptions
from assay_expectations.decoders.shapes import Shape
from assay_expectations.records import require_writable

REFERENCES, METRICS = "references", "metrics"


@dataclass(frozen=True, slots=True)
class MetricsCapture:
    """A capture of one model, in every shape."""

    model: str
    run: str
    """The trusted device, as DEVICE/DTYPE."""
    shapes: Sequence[Shape]
    num_seeds: int
    """Sets of prompts per shape."""


def capture_metrics(capture: MetricsCapture, output: Path, progress: Progress) -> Iterator[Path]:
    """Write references and metrics into two folders of `output`. Yield each finished file of metrics.

    Raises: UsageError if `run` does not pass the ladder, or if there are too few texts for the prompts.
    """
    num_texts = len(built_in_texts())
    for shape in capture.shapes:
        if capture.num_seeds * shape.batch_size > num_texts:
            raise UsageError(
                f"--seeds {capture.num_seeds} with shape {shape}: the {num_texts} texts are too few, two"
                " sets would have equal prompts"
            )
    require_writable(output)
    options = DecoderOptions(references=output / REFERENCES)
    trials = list(product(capture.shapes, range(capture.num_seeds)))
    with progress.task(f"{capture.model} on {capture.run}", len(trials)) as task:
        for shape, seed in trials:
            with temporary_folder("assay-metrics-") as scratch:
                check = DecoderCheck(
                    capture.model, shape, capture.run, scratch, replace(options, seed=seed)
                )
                verdict = check.run(progress)
                if verdict.verdict is not Outcome.PASS:
                    raise UsageError(
                        f"{capture.run} cannot be trusted: {capture.model} with shape {shape} is"
                        f" {verdict.verdict.value} against cpu/float32. To reproduce: pytest --pyargs"
                        f" assay_expectations.suites -k decoders --decoder-model {capture.model}"
                        f" --decoder-shape {shape} --assay-device {capture.run}"
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
