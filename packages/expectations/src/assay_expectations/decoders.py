"""The decoder suite: a model and shape against a cached reference, with thresholds and published variables."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.generate.check import capture, check_generate
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.inputs import built_in_texts, read_prompts
from assay.judge.limits import FAILURE_RATE, PUBLISHED_METRICS
from assay.models import RECIPES
from assay.models.sources import hash_files, resolve_model
from assay.runs import Progress
from assay.runs.results import read_measurements
from assay.verdicts import Verdict

_Metric = Annotated[str, Field(pattern=f"^({'|'.join(PUBLISHED_METRICS)})$")]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, lt=1)]
_PREFIX = "FMS_TEST_SHAPES_"
_METRICS = ("cross_entropy", "diff_mean")

# Names of the metrics in FMS_TEST_SHAPES_SKIP_ASSERTIONS.
_PUBLISHED_NAMES = {"ce": "cross_entropy", "mean_diff": "diff_mean"}
_DEFAULT_MODEL = "micro:llama"
_DEFAULT_SIZES = ((1, 4), (16, 64), (8,))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one generation."""

    batch_size: int
    prompt_length: int
    max_new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `4x64x16`: rows, prompt length, new tokens. Raises: UsageError."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise UsageError(
                f"shape {text!r}: expected rows, prompt length and new tokens, such as 4x64x16"
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.prompt_length}x{self.max_new_tokens}"


class Thresholds(BaseModel):
    """A file of `assay calibrate`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    metrics: dict[_Metric, _Positive] = Field(alias="thresholds")
    """Threshold of each metric."""
    failure_rate: _Share = FAILURE_RATE
    """Share of tokens at or over a threshold from which a test fails."""
    false_failure_bound: float | None = None
    runs: dict[str, object] = Field(default_factory=dict)


NO_THRESHOLDS = Thresholds(metrics={})

DEFAULT_SHAPES = tuple(Shape(*sizes) for sizes in product(*_DEFAULT_SIZES))


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Options of `test_decoders`."""

    models: tuple[str, ...] = (_DEFAULT_MODEL,)
    """Folders, hub names or micro:RECIPE."""
    shapes: tuple[Shape, ...] = DEFAULT_SHAPES
    attentions: tuple[str, ...] = ("default",)
    """Attention of the candidate, as named by transformers."""
    prompts: Path | None = None
    """File in the format of `read_prompts`; None for the built-in texts."""
    tokens_per_row: int | None = None
    """Tokens for each row of a shape, in as many batches as necessary; None for one batch."""
    thresholds: Thresholds = NO_THRESHOLDS
    references: Path | None = None
    """Cache of references."""
    ranks: int = 1
    """Devices over which the candidate's model is sharded."""

    def num_prompts(self, shape: Shape) -> int:
        """Return the number of prompts of a shape."""
        batches = ceil((self.tokens_per_row or 1) / shape.max_new_tokens)
        return shape.batch_size * max(batches, 1)


def options_from(environment: Mapping[str, str] = os.environ) -> DecoderOptions:
    """Read the options from the published variables.

    Source: MODEL.md and tests/models/test_decoders.py of foundation-model-stack/aiu-fms-testing-utils.
    FORCE_VALIDATION_LEVEL_1 and SAVE_VALIDATION_INFO_OUTPUTS have no effect: metrics are always compared,
    and outputs of the candidate are always in the folder of its run.
    Raises: UsageError that names the variable.
    """
    variables = _Variables(environment)
    changes: dict[str, Any] = {}
    uses_micro_models = all(variables.read("USE_MICRO_MODELS", "0 or 1")[:1])
    if models := variables.words("COMMON_MODEL_PATHS"):
        found = map(micro_model, models) if uses_micro_models else models
        changes["models"] = tuple(dict.fromkeys(found))
    sizes = [
        variables.read(name, "positive integers")
        for name in ("COMMON_BATCH_SIZES", "COMMON_SEQ_LENGTHS", "COMMON_MAX_NEW_TOKENS")
    ]
    if any(sizes):
        chosen = [given or default for given, default in zip(sizes, _DEFAULT_SIZES, strict=True)]
        changes["shapes"] = tuple(Shape(*shape) for shape in product(*chosen))
    if tokens := variables.read("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", "positive integers"):
        if len(tokens) > 1:
            raise variables.error("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", "one number")
        changes["tokens_per_row"] = tokens[0]
    if folder := environment.get(f"{_PREFIX}VALIDATION_INFO_DIR"):
        changes["references"] = Path(folder)
    return DecoderOptions(thresholds=_read_thresholds(variables), **changes)


def _read_thresholds(variables: "_Variables") -> Thresholds:
    metrics: dict[str, float] = {}
    if limits := variables.read("METRICS_THRESHOLD", "positive numbers"):
        if len(limits) != len(_METRICS):
            raise variables.error(
                "METRICS_THRESHOLD", "two numbers, for cross_entropy and diff_mean"
            )
        skipped = variables.read("SKIP_ASSERTIONS", "ce, mean_diff or both")
        by_name = zip(_METRICS, limits, strict=True)
        metrics = {name: limit for name, limit in by_name if name not in skipped}
    rates = variables.read("FAILURE_THRESHOLD", "positive numbers") or [FAILURE_RATE]
    if len(rates) > 1 or rates[0] >= 1:
        raise variables.error("FAILURE_THRESHOLD", "one share below 1")
    return Thresholds(metrics=metrics, failure_rate=rates[0])


def micro_model(name: str) -> str:
    """Return the micro model of a real model's family, which its name contains.

    Raises: UsageError for a family without a micro model.
    """
    if name.startswith("micro:"):
        return name
    # The owner comes last, because mistralai has models of several families.
    for part in reversed(Path(name).parts):
        found = [recipe for recipe in RECIPES if _letters(recipe) in _letters(part)]
        if found:
            return f"micro:{max(found, key=len)}"
    raise UsageError(
        f"there is no micro model for {name}; micro models: {', '.join(sorted(RECIPES))}."
        f" {_PREFIX}USE_MICRO_MODELS=0 runs the model itself"
    )


def _letters(name: str) -> str:
    """Keep letters and digits, because spellings of families differ in dashes and dots."""
    return "".join(filter(str.isalnum, name.lower()))


def _require_positive(value: float) -> float:
    """Return `value`. A NaN threshold would never fail."""
    if not 0 < value < inf:
        raise ValueError(value)
    return value


# The conversion of a word of a variable, by what is expected.
_CONVERSIONS: Mapping[str, Callable[[str], Any]] = {
    "0 or 1": ("0", "1").index,
    "positive integers": lambda word: _require_positive(int(word)),
    "positive numbers": lambda word: _require_positive(float(word)),
    "ce, mean_diff or both": lambda word: _PUBLISHED_NAMES[word.lower()],
}


@dataclass(frozen=True, slots=True)
class _Variables:
    """Typed access to the published variables."""

    environment: Mapping[str, str]

    def words(self, name: str) -> list[str]:
        """Split a variable at commas."""
        text = self.environment.get(_PREFIX + name, "")
        return [word.strip() for word in text.split(",") if word.strip()]

    def read(self, name: str, expected: str) -> list[Any]:
        """Convert the words of a variable. Raises: UsageError."""
        convert = _CONVERSIONS[expected]
        try:
            return [convert(word) for word in self.words(name)]
        except (KeyError, ValueError):
            raise self.error(name, expected) from None

    def error(self, name: str, expected: str) -> UsageError:
        """Make the error for an invalid value."""
        value = self.environment.get(_PREFIX + name)
        return UsageError(f"{_PREFIX}{name} is {value!r}; expected: {expected}")


REFERENCE = "cpu/float32"
_SOFTWARE = ("assay-core", "torch", "transformers")

# Longer than common tokens, so that texts have enough tokens.
_CHARACTERS_A_TOKEN = 8


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

    def exceeded_thresholds(self) -> list[str]:
        """Describe each published metric with too many tokens at or over its threshold. NaN counts as over."""
        thresholds = self.options.thresholds
        values: dict[str, list[float]] = {name: [] for name in thresholds.metrics}
        rows, complaints = read_measurements(self.results)
        if complaints:
            raise UsageError(f"{self.results}: {complaints[0]}")
        for row in rows:
            if row.statistic in values:
                values[row.statistic].append(row.actual)
        exceeded = []
        for name, limit in thresholds.metrics.items():
            if not (found := values[name]):
                raise UsageError(f"no token has {name}: {self.results}")
            rate = sum(not value < limit for value in found) / len(found)
            if rate >= thresholds.failure_rate:
                exceeded.append(
                    f"{name}: {rate:.2%} of the tokens are at or over {limit:g}"
                    f" (fails from {thresholds.failure_rate:.2%})"
                )
        return exceeded

    def _reference(self, inputs: InputOptions, lines: str, progress: Progress) -> Path:
        """Return the reference's folder: cached in `references`, or captured now."""
        dtype = parse_run(self.candidate).dtype
        if self.options.references is None:
            golden = self.folder / "reference"
        else:
            software = [f"{name} {version(name)}" for name in _SOFTWARE]
            asked = [lines, str(self.shape), REFERENCE, dtype, *software]
            text = "\0".join([*asked, hash_files(resolve_model(self.model), "refuse")])
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


def prompt_lines(texts: Sequence[str], num_prompts: int, length: int) -> str:
    """Format prompts of at least `length` tokens as JSON lines. The check shortens them.

    Each prompt joins texts from another start, so texts can repeat.
    """
    lines = []
    for number in range(num_prompts):
        parts: list[str] = []
        while sum(map(len, parts)) < _CHARACTERS_A_TOKEN * length:
            parts.append(texts[(number + len(parts)) % len(texts)])
        lines.append(json.dumps({"text": "\n\n".join(parts)}))
    return "\n".join(lines) + "\n"


def read_texts(file: Path | None) -> Sequence[str]:
    """Return the first message of each line of a prompts file, or the built-in texts. Raises: UsageError."""
    if file is None:
        return built_in_texts()
    texts = [message["content"] for line in read_prompts(file) for message in line.messages[:1]]
    if not any(texts):
        raise UsageError(f"prompts {file}: the file contains no text")
    return texts
