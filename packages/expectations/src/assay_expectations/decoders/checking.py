"""A check of one model and shape, with a cached reference."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import content_digest, file_digest
from assay.generate.check import capture, check_generate
from assay.generate.processes.requests import CaptureRequest, GenerateCheck, InputOptions
from assay.models.folders import local_folder
from assay.models.sources import resolve_model
from assay.runs import Progress
from assay.runs.results import read_measurements
from assay.verdicts import Verdict
from assay_expectations.decoders.options import DecoderOptions
from assay_expectations.decoders.prompts import prompt_lines, read_texts
from assay_expectations.decoders.shapes import Shape
from assay_expectations.decoders.thresholds import Thresholds

REFERENCE = "cpu/float32"
_SOFTWARE = ("assay-core", "torch", "transformers")


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
            candidate=self.candidate,
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
        return self.options.thresholds_of(self.shape)

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
            self._capture(Path(folder) / "golden", dtype, inputs, progress)
            try:
                (Path(folder) / "golden").rename(golden)
            except OSError:
                # Another run captured the same reference first.
                if not golden.is_dir():
                    raise
        return golden

    def _capture(self, folder: Path, dtype: str, inputs: InputOptions, progress: Progress) -> None:
        folder.mkdir()
        request = CaptureRequest(
            model=self.model,
            reference=REFERENCE,
            noise_for=[dtype],
            inputs=inputs,
            folder=str(folder),
        )
        capture(request, self.folder, progress)


def content_of_model(model: str) -> str:
    """Hash the names and bytes of all files of a model."""
    with local_folder(resolve_model(model), "refuse") as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return content_digest({str(file.relative_to(folder)): file_digest(file) for file in files})
