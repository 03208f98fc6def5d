"""The recipe of a tuning: which models are trained on what, and in which ways. Imports no torch."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import read_toml, validate_record
from assay.foreign_text import shorten
from assay.models.sources import resolve_model
from assay.verdicts import Record
from assay_bench.tuning.texts import BUILT_IN

_SUFFIX = ".toml"


class RecipeError(UsageError):
    """A recipe that cannot be tuned."""

    @classmethod
    def of(cls, path: object, problem: str, key: str = "") -> Self:
        """`key`: where the problem is; empty for the whole file."""
        return cls(f"{path}: {f'{key}: ' if key else ''}{shorten(problem)}")


class _RecipePart(Record):
    model_config = ConfigDict(extra="forbid", strict=True)


class DataSource(_RecipePart):
    """A text to train on.

    source: `standard-library`, `sums`, or a file: JSONL with one {"text": ...} a line, or text whose
        documents are parted by empty lines. A relative path begins at the recipe's folder.
    share: of the rows of every batch, in proportion to the shares of the other sources.
    """

    source: str
    share: PositiveFloat = 1.0


class Permutation(_RecipePart):
    """One way to train.

    learning_rate: of AdamW, constant over the steps.
    trainer: NAME or FILE.py:CLASS, as for `assay check train --candidate-trainer`.
    ranks: all of the axis dp; they share the rows of a batch.
    features: as in `assay.training.TrainingPlan`: lora, mixed-precision, recompute, ...
    """

    learning_rate: PositiveFloat
    trainer: str = "reference"
    ranks: PositiveInt = 1
    features: list[str] = Field(default_factory=list)


class TuningRecipe(_RecipePart):
    """What is tuned: every model in every permutation with every seed.

    models: micro:RECIPE, folders or hub names. run: DEVICE/DTYPE.
    steps: optimizer steps. batch_size: rows of a step, over all ranks.
    sequence_length: tokens of a row. checkpoint_every: steps.
    seeds: which rows are drawn, and what an adapter starts from.
    """

    models: list[str] = Field(min_length=1)
    run: str
    seeds: list[NonNegativeInt] = Field(min_length=1)
    steps: PositiveInt
    batch_size: PositiveInt
    sequence_length: int = Field(ge=2)
    checkpoint_every: PositiveInt
    data: list[DataSource] = Field(min_length=1)
    permutations: dict[str, Permutation] = Field(min_length=1)

    @property
    def hash(self) -> str:
        """Of what the recipe says; order of keys and comments have no effect."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.model_dump(), sort_keys=True).encode())

    @model_validator(mode="after")
    def _require_consistency(self) -> Self:
        for name, permutation in self.permutations.items():
            if self.batch_size % permutation.ranks:
                raise ValueError(
                    f"{permutation.ranks} ranks of permutation {name} cannot share out a batch_size"
                    f" of {self.batch_size} evenly"
                )
        sources = [one.source for one in self.data]
        for kind, values in (("models", self.models), ("seeds", self.seeds), ("data", sources)):
            if len(set(values)) < len(values):
                raise ValueError(f"{kind} names one twice")
        return self


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe, and the folder that its relative paths begin at."""

    recipe: TuningRecipe
    folder: Path


def read_recipe(name: str, run: str | None = None) -> RecipeFile:
    """The recipe in the file `name`, or the one of that name that ships with the package.

    run: DEVICE/DTYPE in place of the recipe's; None leaves that.
    Raises: RecipeError that names file and key, before anything is loaded.
    """
    path = Path(name)
    if path.suffix != _SUFFIX:
        path = Path(str(files("assay_bench") / "recipes" / f"{name}{_SUFFIX}"))
    if not path.exists():
        raise UsageError(f"recipe {name} does not exist; shipped recipes: {_shipped()}")
    document = read_toml(path)
    if run is not None:
        document["run"] = run
    return RecipeFile(_validate(path, document), path.parent.resolve())


def _validate(path: Path, document: dict[str, Any]) -> TuningRecipe:
    recipe = validate_record(TuningRecipe, document, path)
    for number, one in enumerate(recipe.data):
        if one.source not in BUILT_IN and not (path.parent / one.source).is_file():
            problem = f"no file {path.parent / one.source}, and none of {', '.join(BUILT_IN)}"
            raise RecipeError.of(path, problem, f"data.{number}.source")
    try:
        parse_run(recipe.run)
    except UsageError as error:
        raise RecipeError.of(path, str(error), "run") from None
    for number, model in enumerate(recipe.models):
        _require_decoder(path, model, f"models.{number}")
    return recipe


def _require_decoder(path: Path, model: str, key: str) -> None:
    try:
        micro = resolve_model(model).recipe
    except UsageError as error:
        raise RecipeError.of(path, str(error), key) from None
    if micro is not None and micro.masked:
        raise RecipeError.of(path, f"{model} predicts no next token", key)


def _shipped() -> str:
    folder = files("assay_bench") / "recipes"
    names = (Path(str(entry)) for entry in folder.iterdir())
    return ", ".join(sorted(entry.stem for entry in names if entry.suffix == _SUFFIX))
