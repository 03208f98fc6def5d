"""Checks of one model and shape with a cached reference, and the metrics of a trusted device, from which thresholds are calibrated."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from assay.comparing.limits import PUBLISHED_METRICS
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import content_digest, file_digest, read_json, write_whole
from assay.generate.check import capture, check_generate
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.inputs import built_in_texts
from assay.models.sources import local_folder, resolve_model
from assay.runs import Progress
from assay.runs.results import read_measurements
from assay.verdicts import Outcome, Verdict
from assay.watchdog import temporary_folder
from assay_expectations.decoders.options import DecoderOptions, Shape, Thresholds
from assay_expectations.records import require_writable

REFERENCE = "cpu/float32"
_SOFTWARE = ("assay-core", "torch", "transformers")

# Longer than common tokens, so that texts have enough tokens.
_CHARACTERS_A_TOKEN = 8

_HUMAN = ("human", "user")


@dataclass(frozen=True, slots=True)
class DecoderCheck:
    """A check of a candidate with one model and shape."""

    model: str
    shape: Shape
    candidate: str
    """DEVICE/DTYPE."""
    folder: Path
    """Existing folder of the run."""
    options: DecoderOptions
    setup: str | None = None
    """FILE.py:FUNC to call with the candidate's model."""
    attention: str = "default"
    """Attention of the candidate, as named by transformers."""

    def run(self, progress: Progress) -> Verdict:
        """Run the ladder of `assay check generate`.

        Raises: UsageError for a shape that exceeds the model's context.
        """
        num_prompts = self.options.num_prompts(self.shape)
        lines = prompt_lines(
            read_texts(self.options.prompts),
            num_prompts,
            self.shape.prompt_length,
            first=self.options.seed * num_prompts,
        )
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text(lines, encoding="utf-8")
        inputs = InputOptions(
            prompts=str(prompts),
            prompt_length=str(self.shape.prompt_length),
            batch_size=self.shape.batch_size,
            max_new_tokens=self.shape.max_new_tokens,
        )
        golden = self._reference(inputs, lines, progress)
        check = GenerateCheck(
            model=self.model,
            candidate=parse_run(self.candidate),
            golden=golden,
            setup=self.setup,
            mesh={"tp": self.options.ranks},
            options={} if self.attention == "default" else {"attention": self.attention},
        )
        self.results.mkdir()
        return check_generate(check, self.results, progress)

    @property
    def results(self) -> Path:
        """Return the folder with verdict, measurements and logs."""
        return self.folder / "check"

    @property
    def thresholds(self) -> Thresholds:
        """Return the thresholds of the shape."""
        return self.options.shape_thresholds.get(self.shape, self.options.thresholds)

    def exceeded_thresholds(self) -> list[str]:
        """Describe each published metric with too many tokens at or over its threshold."""
        thresholds = self.thresholds
        return [
            f"{name}: {rate:.2%} of the tokens are at or over {thresholds.metrics[name]:g}"
            f" (fails from {thresholds.failure_rate:.2%})"
            for name, rate in self.failure_rates().items()
            if rate >= thresholds.failure_rate
        ]

    def failure_rates(self) -> dict[str, float]:
        """Return the share of tokens at or over the threshold of each metric. NaN counts as over."""
        values: dict[str, list[float]] = {name: [] for name in self.thresholds.metrics}
        rows, complaints = read_measurements(self.results)
        if complaints:
            raise UsageError(f"{self.results}: {complaints[0]}")
        for row in rows:
            if row.statistic in values:
                values[row.statistic].append(row.actual)
        if empty := [name for name, found in values.items() if not found]:
            raise UsageError(f"no token has {', '.join(empty)}: {self.results}")
        return {
            name: sum(not value < limit for value in values[name]) / len(values[name])
            for name, limit in self.thresholds.metrics.items()
        }

    def _reference(self, inputs: InputOptions, lines: str, progress: Progress) -> Path:
        """Return the reference's folder: cached in `references`, or captured now."""
        dtype = parse_run(self.candidate).dtype
        if self.options.references is None:
            golden = self.folder / "reference"
        else:
            software = [f"{name} {version(name)}" for name in _SOFTWARE]
            asked = [lines, str(self.shape), REFERENCE, dtype, *software]
            text = "\0".join([*asked, content_of_model(self.model)])
            golden = self.options.references / xxhash.xxh3_128_hexdigest(text.encode())
            if golden.is_dir():
                return golden
            golden.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=golden.parent) as folder:
            captured = Path(folder) / "golden"
            captured.mkdir()
            spec = GoldenSpec(
                model=self.model,
                reference=parse_run(REFERENCE),
                noise_for=[dtype],
                inputs=inputs,
                folder=captured,
            )
            capture(spec, self.folder, progress)
            try:
                captured.rename(golden)
            except OSError:
                # Another run captured the same reference first.
                if not golden.is_dir():
                    raise
        return golden


def content_of_model(model: str) -> str:
    """Hash the names and bytes of all files of a model."""
    with local_folder(resolve_model(model), "refuse") as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return content_digest({str(file.relative_to(folder)): file_digest(file) for file in files})


def prompt_lines(texts: Sequence[str], num_prompts: int, length: int, first: int = 0) -> str:
    """Format prompts of at least `length` tokens as JSON lines. The check shortens them.

    Each prompt joins texts from another start, so texts can repeat.
    first: index of the first prompt's first text.
    """
    lines = []
    for number in range(first, first + num_prompts):
        parts: list[str] = []
        while sum(map(len, parts)) < _CHARACTERS_A_TOKEN * length:
            parts.append(texts[(number + len(parts)) % len(texts)])
        lines.append(json.dumps({"text": "\n\n".join(parts)}))
    return "\n".join(lines) + "\n"


def read_texts(file: Path | None) -> Sequence[str]:
    """Read the first message of each conversation in a ShareGPT file, or return the built-in texts.

    Raises: UsageError that names file and conversation.
    """
    if file is None:
        return built_in_texts()
    conversations = read_json(file)
    if not isinstance(conversations, list) or not conversations:
        raise UsageError(f"prompts {file}: expected a list of conversations in the ShareGPT format")
    texts = [
        text
        for number, one in enumerate(conversations)
        for text in _asked(one, f"{file}: {number}")
    ]
    if not texts:
        raise UsageError(f"prompts {file}: no conversation begins with a human message")
    return texts


def _asked(conversation: object, where: str) -> Iterator[str]:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise UsageError(f"{where}: expected an object with a list `conversations`")
    for message in messages[:1]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise UsageError(f"{where}: expected messages with `from` and a text `value`")
        if message.get("from") in _HUMAN and message["value"]:
            yield message["value"]


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
