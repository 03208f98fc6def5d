"""What is tried: models, shapes, prompts; and what is asked of the published metrics."""

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
# The names that FMS_TEST_SHAPES_SKIP_ASSERTIONS has for them.
_PUBLISHED_NAMES = {"ce": "cross_entropy", "mean_diff": "diff_mean"}
_FAMILY_DEFAULT = "micro:llama"


DEFAULT_SHAPES = tuple(Shape(batch, length, 8) for batch, length in product((1, 4), (16, 64)))


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What `test_decoders` does.

    models: folders, hub names or micro:RECIPE.
    attentions: implementations of the candidate, as transformers names them; "default" for its own.
    prompts: a file in the format of ShareGPT; None for the built-in texts.
    tokens_per_row: how many are generated for each row of a shape, in several batches if need be; None
        for one batch.
    thresholds: of the published metrics; shape_thresholds: for shapes that have their own.
    references: folder of references that are kept and used again; None for none.
    seed: other prompts for each.
    ranks: over which the candidate's model is divided.
    """

    models: tuple[str, ...] = (_FAMILY_DEFAULT,)
    shapes: tuple[Shape, ...] = DEFAULT_SHAPES
    attentions: tuple[str, ...] = ("default",)
    prompts: Path | None = None
    tokens_per_row: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    shape_thresholds: Mapping[Shape, Thresholds] = field(default_factory=dict)
    references: Path | None = None
    seed: int = 0
    ranks: int = 1

    def thresholds_of(self, shape: Shape) -> Thresholds:
        """What `shape` is held to."""
        return self.shape_thresholds.get(shape, self.thresholds)

    def num_prompts(self, shape: Shape) -> int:
        """How many prompts are tried of `shape`."""
        batches = ceil((self.tokens_per_row or 1) / shape.max_new_tokens)
        return shape.batch_size * max(batches, 1)


def options_from(environment: Mapping[str, str] = os.environ) -> DecoderOptions:
    """The options that the published variables ask for; what they leave out is as by default.

    Source: MODEL.md and tests/models/test_decoders.py of foundation-model-stack/aiu-fms-testing-utils.
    FORCE_VALIDATION_LEVEL_1 and SAVE_VALIDATION_INFO_OUTPUTS ask for what is always done: metrics are
    compared whether or not the tokens agree, and what a candidate gave is in the folder of its run.
    Raises: UsageError naming the variable.
    """
    read = _Variables(environment)
    read.flag("FORCE_VALIDATION_LEVEL_1")
    read.flag("SAVE_VALIDATION_INFO_OUTPUTS")
    options = DecoderOptions()
    is_micro = read.flag("USE_MICRO_MODELS", otherwise=True)
    if models := read.words("COMMON_MODEL_PATHS"):
        found = [micro_model(name) if is_micro else name for name in models]
        options = replace(options, models=tuple(dict.fromkeys(found)))
    lists = [
        read.counts(name)
        for name in ("COMMON_BATCH_SIZES", "COMMON_SEQ_LENGTHS", "COMMON_MAX_NEW_TOKENS")
    ]
    if any(lists):
        ours = ((1, 4), (16, 64), (8,))
        chosen = [given or usual for given, usual in zip(lists, ours, strict=True)]
        options = replace(options, shapes=tuple(Shape(*sizes) for sizes in product(*chosen)))
    if tokens := read.counts("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE"):
        if len(tokens) > 1:
            raise read.wrong("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", "one number")
        options = replace(options, tokens_per_row=tokens[0])
    if limits := read.numbers("METRICS_THRESHOLD"):
        if len(limits) != len(_METRICS):
            raise read.wrong("METRICS_THRESHOLD", "two numbers, of cross_entropy and of diff_mean")
        skipped = {read.metric(name) for name in read.words("SKIP_ASSERTIONS")}
        by_name = dict(zip(_METRICS, limits, strict=True))
        kept = {name: limit for name, limit in by_name.items() if name not in skipped}
        options = replace(options, thresholds=replace(options.thresholds, metrics=kept))
    if rates := read.numbers("FAILURE_THRESHOLD"):
        if len(rates) > 1 or rates[0] >= 1:
            raise read.wrong("FAILURE_THRESHOLD", "one share, under 1")
        options = replace(options, thresholds=replace(options.thresholds, failure_rate=rates[0]))
    if folder := environment.get(f"{_PREFIX}VALIDATION_INFO_DIR"):
        options = replace(options, references=Path(folder))
    return options


def micro_model(name: str) -> str:
    """The micro model in place of a real one: of the family that its name has.

    Raises: UsageError where there is none of its family.
    """
    if name.startswith("micro:"):
        return name
    # The owner's name comes last: mistralai has models of several families.
    for part in reversed(Path(name).parts):
        found = [recipe for recipe in RECIPES if _letters(recipe) in _letters(part)]
        if found:
            return f"micro:{max(found, key=len)}"
    raise UsageError(
        f"there is no micro model for {name}; there are: {', '.join(sorted(RECIPES))}."
        f" {_PREFIX}USE_MICRO_MODELS=0 tries the model itself"
    )


def _letters(name: str) -> str:
    """Letters and digits alone: families are written with dashes, dots or neither."""
    return "".join(filter(str.isalnum, name.lower()))


@dataclass(frozen=True, slots=True)
class _Variables:
    """The published variables, read as what they have to be."""

    environment: Mapping[str, str]

    def words(self, name: str) -> list[str]:
        """What stands between commas."""
        text = self.environment.get(_PREFIX + name, "")
        return [word.strip() for word in text.split(",") if word.strip()]

    def flag(self, name: str, *, otherwise: bool = False) -> bool:
        """1 or 0."""
        value = self.environment.get(_PREFIX + name, str(int(otherwise)))
        if value not in ("0", "1"):
            raise self.wrong(name, "0 or 1")
        return value == "1"

    def counts(self, name: str) -> Sequence[int]:
        """Whole numbers from 1."""
        words = self.words(name)
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise self.wrong(name, "whole numbers from 1, with commas between them")
        return [int(word) for word in words]

    def numbers(self, name: str) -> Sequence[float]:
        """Positive numbers: by a NaN nothing would ever fail."""
        try:
            numbers = [float(word) for word in self.words(name)]
        except ValueError:
            raise self.wrong(name, "numbers, with commas between them") from None
        if not all(isfinite(number) and number > 0 for number in numbers):
            raise self.wrong(name, "positive numbers")
        return numbers

    def metric(self, name: str) -> str:
        """The name of a published metric that is left out."""
        try:
            return _PUBLISHED_NAMES[name.lower()]
        except KeyError:
            raise self.wrong("SKIP_ASSERTIONS", "ce, mean_diff or both") from None

    def wrong(self, name: str, wanted: str) -> UsageError:
        """The error for a value of another form."""
        value = self.environment.get(_PREFIX + name)
        return UsageError(f"{_PREFIX}{name} is {value!r}; expected: {wanted}")
