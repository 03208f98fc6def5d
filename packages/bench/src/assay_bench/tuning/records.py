"""Requests to the ranks of a tuning, their answers, and the files of its folder."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field

from assay.errors import UsageError
from assay.files import (
    UnreadableFileError,
    file_digest,
    read_record_lines,
    read_sealed,
    refuse_link,
)
from assay.verdicts import SCHEMA, Number, Record
from assay_bench.tuning.recipe import Permutation, TuningRecipe

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
    """Data and weights before training. Tunings are comparable if these are equal."""

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
    recipe_hash: str
    start: ModelStart
    end: Measured
    """The finished model."""
    candidate: dict[str, Any]
    """Run, trainer, mesh and features, from rank 0."""
    losses_digest: str
    provenance: dict[str, Any]


class Tuning(Record):
    """The record and losses of a finished tuning."""

    record: TuningRecord
    losses: list[StepLoss]

    @property
    def curve(self) -> list[float]:
        """Return the loss of each step, in nats per token."""
        return [one.loss for one in self.losses]


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


def read_tuning(folder: Path) -> Tuning:
    """Read a finished tuning. Raises: UnreadableFileError if a file is damaged or was changed."""
    record = read_sealed(TuningRecord, refuse_link(folder / RECORD_FILE))
    path = refuse_link(folder / LOSSES_FILE)
    if file_digest(path) != record.losses_digest:
        raise UnreadableFileError.of(path, "it was changed after the tuning")
    losses = list(read_record_lines(StepLoss, path))
    if [one.step for one in losses] != list(range(record.recipe.steps)):
        problem = f"it has {len(losses)} of {record.recipe.steps} steps"
        raise UnreadableFileError.of(path, problem)
    return Tuning(record=record, losses=losses)


def read_tunings(output: Path) -> list[Tuning]:
    """Read all finished tunings in the output of `assay bench tune`.

    Raises: UsageError if the output has no tuning; UnreadableFileError as in `read_tuning`.
    """
    # A broken link counts as an unreadable record.
    folders = sorted(output.glob("*/*/seed-*"))
    tunings = [folder for folder in folders if os.path.lexists(folder / RECORD_FILE)]
    if not tunings:
        raise UsageError(f"{output} has no finished tuning of `assay bench tune`")
    return list(map(read_tuning, tunings))
