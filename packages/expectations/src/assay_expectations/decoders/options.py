"""Options of the decoder suite, from published environment variables."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, isfinite
from pathlib import Path

from assay.errors import UsageError
from assay.models import RECIPES
from assay_expectations.decoders.shapes import Shape
from assay_expectations.decoders.thresholds import Thresholds

_PREFIX = "FMS_TEST_SHAPES_"
_METRICS = ("cross_entropy", "diff_mean")
# Names of the metrics in FMS_TEST_SHAPES_SKIP_ASSERTIONS.
_PUBLISHED_NAMES = {"ce": "cross_entropy", "mean_diff": "diff_mean"}
_DEFAULT_MODEL = "micro:llama"

DEFAULT_SHAPES = tuple(Shape(batch, length, 8) for batch, length in product((1, 4), (16, 64)))


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
    thresholds: Thresholds = field(default_factory=Thresholds)
    shape_thresholds: Mapping[Shape, Thresholds] = field(default_factory=dict)
    """Thresholds of shapes that have their own."""
    references: Path | None = None
    """Cache of references."""
    seed: int = 0
    """Selects the prompts."""
    ranks: int = 1
    """Devices over which the candidate's model is sharded."""

    def thresholds_of(self, shape: Shape) -> Thresholds:
        """Return the thresholds of a shape."""
        return self.shape_thresholds.get(shape, self.thresholds)

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
    read = _Variables(environment)
    read.flag("FORCE_VALIDATION_LEVEL_1")
    read.flag("SAVE_VALIDATION_INFO_OUTPUTS")
    options = DecoderOptions()
    is_micro = read.flag("USE_MICRO_MODELS", default=True)
    if models := read.words("COMMON_MODEL_PATHS"):
        found = [micro_model(name) if is_micro else name for name in models]
        options = replace(options, models=tuple(dict.fromkeys(found)))
    lists = [
        read.counts(name)
        for name in ("COMMON_BATCH_SIZES", "COMMON_SEQ_LENGTHS", "COMMON_MAX_NEW_TOKENS")
    ]
    if any(lists):
        defaults = ((1, 4), (16, 64), (8,))
        chosen = [given or default for given, default in zip(lists, defaults, strict=True)]
        options = replace(options, shapes=tuple(Shape(*sizes) for sizes in product(*chosen)))
    if tokens := read.counts("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE"):
        if len(tokens) > 1:
            raise read.wrong("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", "one number")
        options = replace(options, tokens_per_row=tokens[0])
    if limits := read.numbers("METRICS_THRESHOLD"):
        if len(limits) != len(_METRICS):
            raise read.wrong("METRICS_THRESHOLD", "two numbers, for cross_entropy and diff_mean")
        skipped = {read.metric(name) for name in read.words("SKIP_ASSERTIONS")}
        by_name = dict(zip(_METRICS, limits, strict=True))
        kept = {name: limit for name, limit in by_name.items() if name not in skipped}
        options = replace(options, thresholds=replace(options.thresholds, metrics=kept))
    if rates := read.numbers("FAILURE_THRESHOLD"):
        if len(rates) > 1 or rates[0] >= 1:
            raise read.wrong("FAILURE_THRESHOLD", "one share below 1")
        options = replace(options, thresholds=replace(options.thresholds, failure_rate=rates[0]))
    if folder := environment.get(f"{_PREFIX}VALIDATION_INFO_DIR"):
        options = replace(options, references=Path(folder))
    return options


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


@dataclass(frozen=True, slots=True)
class _Variables:
    """Typed access to the published variables."""

    environment: Mapping[str, str]

    def words(self, name: str) -> list[str]:
        """Read comma-separated words."""
        text = self.environment.get(_PREFIX + name, "")
        return [word.strip() for word in text.split(",") if word.strip()]

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Read 1 or 0."""
        value = self.environment.get(_PREFIX + name, str(int(default)))
        if value not in ("0", "1"):
            raise self.wrong(name, "0 or 1")
        return value == "1"

    def counts(self, name: str) -> Sequence[int]:
        """Read positive integers."""
        words = self.words(name)
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise self.wrong(name, "comma-separated positive integers")
        return [int(word) for word in words]

    def numbers(self, name: str) -> Sequence[float]:
        """Read positive numbers. A NaN threshold would never fail."""
        try:
            numbers = [float(word) for word in self.words(name)]
        except ValueError:
            raise self.wrong(name, "comma-separated numbers") from None
        if not all(isfinite(number) and number > 0 for number in numbers):
            raise self.wrong(name, "positive numbers")
        return numbers

    def metric(self, name: str) -> str:
        """Translate the name of a skipped metric."""
        try:
            return _PUBLISHED_NAMES[name.lower()]
        except KeyError:
            raise self.wrong("SKIP_ASSERTIONS", "ce, mean_diff or both") from None

    def wrong(self, name: str, wanted: str) -> UsageError:
        """Make the error for an invalid value."""
        value = self.environment.get(_PREFIX + name)
        return UsageError(f"{_PREFIX}{name} is {value!r}; expected: {wanted}")
