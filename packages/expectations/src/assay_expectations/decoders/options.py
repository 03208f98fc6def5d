"""Options of the decoder suite: input shapes, thresholds, and the published environment variables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from assay.comparing.limits import FAILURE_RATE, PUBLISHED_METRICS
from assay.errors import UsageError
from assay.files import read_toml_record
from assay.models import RECIPES

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
    """The thresholds of one shape."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    metrics: dict[_Metric, _Positive] = Field(alias="thresholds")
    """Threshold of each metric."""
    failure_rate: _Share = FAILURE_RATE
    """Share of tokens at or over a threshold from which a test fails."""


NO_THRESHOLDS = Thresholds(metrics={})


class _File(Thresholds):
    """A file of `assay calibrate`."""

    false_failure_bound: float | None = None
    runs: dict[str, object] = Field(default_factory=dict)
    shapes: dict[str, Thresholds] = Field(default_factory=dict)


def read_thresholds(path: Path) -> tuple[Thresholds, dict[Shape, Thresholds]]:
    """Read a file of `assay calibrate`. Returns: the thresholds for all shapes, and for single shapes.

    A table such as `[shapes.4x64x16.thresholds]`, with an optional `failure_rate` in `[shapes.4x64x16]`,
    serves a single shape.
    Raises: UsageError.
    """
    read = read_toml_record(_File, path)
    rates = {"failure_rate": read.failure_rate}
    by_shape = {
        Shape.parse(name): Thresholds(
            metrics=read.metrics | own.metrics,
            **rates | own.model_dump(include={"failure_rate"}, exclude_unset=True),
        )
        for name, own in read.shapes.items()
    }
    return Thresholds(metrics=read.metrics, **rates), by_shape


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
    """File in the ShareGPT format; None for the built-in texts."""
    tokens_per_row: int | None = None
    """Tokens for each row of a shape, in as many batches as necessary; None for one batch."""
    thresholds: Thresholds = NO_THRESHOLDS
    shape_thresholds: Mapping[Shape, Thresholds] = field(default_factory=dict)
    """Thresholds of shapes that have their own."""
    references: Path | None = None
    """Cache of references."""
    seed: int = 0
    """Selects the prompts."""
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
    for name in ("FORCE_VALIDATION_LEVEL_1", "SAVE_VALIDATION_INFO_OUTPUTS"):
        variables.read(name, "0 or 1")
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
