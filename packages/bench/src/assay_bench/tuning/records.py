"""Tuning recipes with their texts; requests to the ranks of a tuning, their answers, and the files of its folder.

Imports no torch.
"""

import json
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import (
    read_record_lines,
    read_text,
    read_toml,
    validate_record,
)
from assay.foreign_text import shorten
from assay.models.sources import resolve_model
from assay.verdicts import SCHEMA, Number, Record

# One document in 20 is held out. The choice depends only on its content, so equal documents are in the
# same part on every machine.
HELD_OUT_SHARE = 20

# 10,000 sums.
_NUM_SUMMANDS = 100

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Text:
    """The two parts of a text, which share no document."""

    training: str
    held_out: str

    @property
    def hash(self) -> str:
        """Hash both parts."""
        digest = xxhash.xxh3_128(self.training.encode())
        digest.update(b"\0")
        digest.update(self.held_out.encode())
        return digest.hexdigest()


def read_training_text(source: str, folder: Path) -> Text:
    """Read a built-in text or a file in the format of `DataSource`.

    folder: folder of a relative path.
    Raises: UsageError if one part of a file's text would be empty.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    path = folder / source
    documents = _read_documents(path)
    text = _split(documents, "\n\n")
    if not text.training or not text.held_out:
        raise UsageError(
            f"{path}: one in {HELD_OUT_SHARE} of {len(documents)} documents is held out by its content;"
            f" the {'training' if not text.training else 'held-out'} part is empty: add documents"
        )
    return text


def _standard_library() -> Text:
    """Read the source of the running Python's standard library, split by files."""
    from assay.models.micro.recipes import standard_library_text

    training, held_out = standard_library_text()
    return Text(training.decode(errors="replace"), held_out.decode(errors="replace"))


def _sums() -> Text:
    """Make lines like `37+45=82` of all numbers below 100, shuffled."""
    numbers = range(_NUM_SUMMANDS)
    documents = [f"{one}+{other}={one + other}" for one in numbers for other in numbers]
    random.Random(0).shuffle(documents)  # noqa: S311 - reproducible
    return _split(documents, "\n")


BUILT_IN: Mapping[str, Callable[[], Text]] = {"standard-library": _standard_library, "sums": _sums}


def _read_documents(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [line.text for line in read_record_lines(_Document, path)]
    text = read_text(path, _MAX_BYTES)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


class _Document(BaseModel):
    """A line of a JSONL file."""

    text: str


def _split(documents: Sequence[str], separator: str) -> Text:
    parts: dict[bool, list[str]] = {True: [], False: []}
    for document in documents:
        parts[zlib.crc32(document.encode()) % HELD_OUT_SHARE == 0].append(document)
    return Text(separator.join(parts[False]), separator.join(parts[True]))


_RECIPES = Path(str(files("assay_bench") / "recipes"))


class _RecipePart(Record):
    model_config = ConfigDict(extra="forbid", strict=True)


class DataSource(_RecipePart):
    """A text to train on."""

    source: str
    """`standard-library`, `sums`, or a file, relative to the recipe's folder.

    A JSONL file has one {"text": ...} per line. In any other file, empty lines separate documents.
    """
    share: PositiveFloat = 1.0
    """Share of the rows of a batch, relative to the other sources."""
    margin: NonNegativeFloat = 0.1
    """Largest acceptable rise of its held-out loss, in nats per token: 0.1 is 10 % of the perplexity."""


class Permutation(_RecipePart):
    """One way to train."""

    learning_rate: PositiveFloat
    """Constant learning rate of AdamW."""
    trainer: str = "reference"
    """NAME or FILE.py:CLASS, as for `assay check train --candidate-trainer`."""
    ranks: PositiveInt = 1
    """Data-parallel ranks, which share the rows of a batch."""
    features: list[str] = Field(default_factory=list)
    """Features of `assay.training.TrainingPlan`: lora, mixed-precision, recompute, ..."""


class TuningRecipe(_RecipePart):
    """A recipe: trains every model in every permutation with every seed."""

    models: list[str] = Field(min_length=1)
    """micro:RECIPE, folders or hub names."""
    run: str
    """DEVICE/DTYPE."""
    seeds: list[NonNegativeInt] = Field(min_length=1)
    """Seeds of the rows and of an adapter's initial weights."""
    steps: PositiveInt
    batch_size: PositiveInt
    """Rows of a step, over all ranks."""
    sequence_length: int = Field(ge=2)
    """Tokens of a row."""
    checkpoint_every: PositiveInt
    """Steps between checkpoints."""
    held_out_rows: int = Field(default=32, ge=2)
    """Rows of each source that are compared before and after.

    With 32 rows of 128 tokens, the standard error of the mean is 0.06 nats per token for the standard library
    and 0.01 for sums.
    """
    data: list[DataSource] = Field(min_length=1)
    permutations: dict[str, Permutation] = Field(min_length=1)

    @property
    def hash(self) -> str:
        """Hash the settings, without comments and the order of keys."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.model_dump(), sort_keys=True).encode())

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the rows of each source. All shares add up to 1."""
        total = sum(one.share for one in self.data)
        return {one.source: one.share / total for one in self.data}

    @model_validator(mode="after")
    def _require_consistency(self) -> Self:
        for name, permutation in self.permutations.items():
            if self.batch_size % permutation.ranks:
                raise ValueError(
                    f"the batch_size {self.batch_size} is not divisible by the {permutation.ranks} ranks"
                    f" of permutation {name}"
                )
        sources = [one.source for one in self.data]
        for kind, values in (("models", self.models), ("seeds", self.seeds), ("data", sources)):
            if len(set(values)) < len(values):
                raise ValueError(f"{kind} contains a duplicate")
        return self


def read_recipe(name: str, run: str | None = None) -> tuple[TuningRecipe, Path]:
    """Read the recipe file `name`, or the shipped recipe of that name.

    run: DEVICE/DTYPE that replaces the recipe's; None keeps it.
    Returns: the recipe, and the folder of its relative paths.
    Raises: UsageError that names file and key.
    """
    path = Path(name) if name.endswith(".toml") else _RECIPES / f"{name}.toml"
    if not path.exists():
        shipped = ", ".join(sorted(recipe.stem for recipe in _RECIPES.glob("*.toml")))
        raise UsageError(f"recipe {name} does not exist; shipped recipes: {shipped}")
    document = read_toml(path)
    if run is not None:
        document["run"] = run
    recipe = validate_record(TuningRecipe, document, path)
    with _errors_at(f"{path}: run"):
        parse_run(recipe.run)
    for number, one in enumerate(recipe.data, 1):
        with _errors_at(f"{path}: data, entry {number}: source"):
            _require_text(path.parent, one.source)
    for number, model in enumerate(recipe.models, 1):
        with _errors_at(f"{path}: models, entry {number}"):
            require_decoder(model)
    return recipe, path.parent.resolve()


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {shorten(str(error))}") from None


def _require_text(folder: Path, source: str) -> None:
    if source not in BUILT_IN and not (folder / source).is_file():
        built_in = ", ".join(BUILT_IN)
        raise UsageError(f"{folder / source} is not a file; built-in texts: {built_in}")


def require_decoder(model: str) -> None:
    """Raise UsageError for a model that cannot be resolved, or a recipe of an encoder."""
    micro = resolve_model(model).recipe
    if micro is not None and micro.masked:
        raise UsageError(f"{model} does not predict next tokens")


RECORD_FILE, LOSSES_FILE = "tuning.json", "losses.jsonl"
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
_CHECKPOINTS = "checkpoints"
# A partial checkpoint, in progress or from a killed run.
PART = "part"


class StepLoss(Record):
    """One line of losses.jsonl."""

    step: int
    """Counted from 0."""
    loss: Number
    """Mean over the label tokens of the step, in nats."""
    learning_rate: float
    tokens: int
    """Number of label tokens."""
    seconds: float
    """Duration of the step."""


class Measured(Record):
    """A model in its folder, measured after it was read."""

    weights_hash: str
    held_out: dict[str, list[Number]]
    """For each source, nats per token of each held-out row."""


class ModelStart(Measured):
    """Data and weights before training."""

    data_hash: dict[str, str]
    """Hash of each source's text."""


class _OneTuning(Record):
    """One model, permutation and seed of a recipe."""

    recipe: TuningRecipe
    model: str
    permutation: str
    seed: int

    @property
    def way(self) -> Permutation:
        """Return the settings of the permutation."""
        return self.recipe.permutations[self.permutation]

    @property
    def title(self) -> str:
        """Return the name for messages and verdicts."""
        return f"{self.model} {self.permutation} seed {self.seed}"


class TuneTask(_OneTuning):
    """A request to train one model in one permutation with one seed."""

    sources: Path
    """Folder of the recipe's relative paths."""
    folder: Path
    """Folder of this tuning."""
    done: int = 0
    """Steps before the newest checkpoint."""


class TuningRecord(_OneTuning):
    """The file tuning.json. It is written last, so its presence marks a finished tuning."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    start: ModelStart
    end: Measured
    """The finished model."""
    candidate: dict[str, Any]
    """Run, trainer, mesh and features, from rank 0."""
    losses: list[StepLoss]
    provenance: dict[str, Any]


def model_folder(output: Path, model: str) -> Path:
    """Return the folder of a model's tunings."""
    return output / re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-")


def tuning_folder(output: Path, model: str, permutation: str, seed: int) -> Path:
    """Return the folder of one tuning."""
    return model_folder(output, model) / permutation / f"seed-{seed}"


def checkpoint_folder(tuning: Path, step: int | str) -> Path:
    """Return the folder of the checkpoint after `step` steps, or of the partial one (`PART`)."""
    return tuning / _CHECKPOINTS / str(step)


def keep_only_checkpoint(tuning: Path, step: int) -> None:
    """Remove all checkpoints except the one after `step` steps."""
    folder = tuning / _CHECKPOINTS
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name != str(step):
            shutil.rmtree(entry)


def go_back_to_checkpoint(tuning: Path) -> int:
    """Restore the state at the newest checkpoint. Returns: the number of steps before it."""
    folder, losses = tuning / _CHECKPOINTS, tuning / LOSSES_FILE
    lines = losses.read_bytes().split(b"\n")[:-1] if losses.is_file() else []
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    done = max((int(name) for name in names if name.isdecimal()), default=0)
    if done > len(lines):
        done = 0  # the machine crashed before it wrote the losses to disk
    keep_only_checkpoint(tuning, done)
    losses.write_bytes(b"".join(line + b"\n" for line in lines[:done]))
    return done
