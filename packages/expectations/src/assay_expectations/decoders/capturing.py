"""References and metrics of a trusted device, over shapes and prompts: what thresholds come from."""

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
    """What is captured of one model: every shape with `num_seeds` sets of prompts.

    run: the trusted device, as DEVICE/DTYPE.
    """

    model: str
    run: str
    shapes: Sequence[Shape]
    num_seeds: int


def capture_metrics(capture: MetricsCapture, output: Path, progress: Progress) -> Iterator[Path]:
    """Write references and metrics into two folders in `output`; each file of metrics as it is there.

    Raises: UsageError if `run` does not pass the ladder: nothing is held to a device that is wrong; or
        if there are too few texts for so many sets of prompts.
    """
    num_texts = len(built_in_texts())
    for shape in capture.shapes:
        if capture.num_seeds * shape.batch_size > num_texts:
            raise UsageError(
                f"--seeds {capture.num_seeds} with shape {shape}: there are {num_texts} texts, so that"
                " prompts would be the same in two sets"
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
                        f"{capture.run} is no device to trust: {capture.model} with shape {shape} is"
                        f" {verdict.verdict.value} against cpu/float32. To see it: pytest --pyargs"
                        f" assay_expectations.suites -k decoders --decoder-model {capture.model}"
                        f" --decoder-shape {shape} --assay-device {capture.run}"
                    )
                yield _keep_metrics(check, f"{shape}-seed{seed}", output / METRICS)
            task.advance()


def _keep_metrics(check: DecoderCheck, name: str, folder: Path) -> Path:
    """The published metrics among the measurements of a check, as a file of their own."""
    rows, _ = read_measurements(check.results)
    kept = [row.model_dump_json() for row in rows if row.statistic in PUBLISHED_METRICS]
    owner = "-".join(f"{check.model}-{check.candidate}".replace(":", "/").split("/"))
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(folder / f"{owner}-{name}.jsonl", "\n".join(kept) + "\n")
