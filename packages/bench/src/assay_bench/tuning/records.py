"""What is asked of the ranks of a tuning, what they answer, and what stays in its folder."""

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
# Not whole: still being written, or left by a run that was killed while it wrote.
PART = "part"


class StepLoss(Record):
    """One line of losses.jsonl.

    step: from 0. loss: mean over the label tokens of the step, in nats. tokens: how many these are.
    seconds: that the step took.
    """

    step: int
    loss: Number
    learning_rate: float
    tokens: int
    seconds: float


class ModelStart(Record):
    """What a tuning starts from, which decides whether two of them can be compared.

    data_hash: of all texts, by source. weights_hash: of the untrained model's checkpoint.
    held_out: by source, nats per token of each held-out row before training.
    """

    data_hash: dict[str, str]
    weights_hash: str
    held_out: dict[str, list[Number]]


class TuneTask(Record):
    """One model in one permutation with one seed; `output`: the folder of what it leaves.

    sources: the folder that relative paths of the recipe begin at.
    done: steps that the newest checkpoint has behind it.
    """

    recipe: TuningRecipe
    sources: str
    model: str
    permutation: str
    seed: int
    output: str
    done: int = 0

    @property
    def way(self) -> Permutation:
        """The permutation itself."""
        return self.recipe.permutations[self.permutation]

    @property
    def folder(self) -> Path:
        """`output` as a path."""
        return Path(self.output)

    @property
    def title(self) -> str:
        """How messages and verdicts name it."""
        return title_of(self.model, self.permutation, self.seed)


class Trained(Record):
    """What a rank says that has trained. candidate: its run, trainer, mesh and features."""

    candidate: dict[str, Any]


class Tuned(Record):
    """What the finished model is. held_out: as in ModelStart, of the model as it was written."""

    weights_hash: str
    held_out: dict[str, list[Number]]


class TuningRecord(Record):
    """The file tuning.json. It is written last, so its presence marks a finished tuning.

    candidate: the description from rank 0, see Trained. losses_digest: digest of losses.jsonl.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    recipe_hash: str
    recipe: TuningRecipe
    model: str
    permutation: str
    seed: int
    start: ModelStart
    end: Tuned
    candidate: dict[str, Any]
    losses_digest: str
    provenance: dict[str, Any]

    @property
    def title(self) -> str:
        """How messages and verdicts name it."""
        return title_of(self.model, self.permutation, self.seed)


class Tuning(Record):
    """A finished tuning: its record and its curve."""

    record: TuningRecord
    losses: list[StepLoss]

    @property
    def curve(self) -> list[float]:
        """The loss of each step, in nats per token."""
        return [one.loss for one in self.losses]


def title_of(model: str, permutation: str, seed: int) -> str:
    """How messages and verdicts name a tuning."""
    return f"{model} {permutation} seed {seed}"


def model_folder(output: Path, model: str) -> Path:
    """Where the tunings of `model` lie."""
    return output / _file_name(model)


def held_out_file(of_model: Path, source: str) -> Path:
    """Where the held-out part of the text `source` lies, in the folder of a model."""
    return of_model / f"{_file_name(source)}.held-out.txt"


def tuning_folder(output: Path, model: str, permutation: str, seed: int) -> Path:
    """Where one tuning lies."""
    return model_folder(output, model) / permutation / f"seed-{seed}"


def checkpoint_folder(tuning: Path, step: int | str) -> Path:
    """The checkpoint after `step` steps; of the one that is being written, `PART`."""
    return tuning / _CHECKPOINTS / str(step)


def keep_only_checkpoint(tuning: Path, step: int) -> None:
    """Remove all checkpoints but the one after `step` steps, with what killed runs left."""
    folder = tuning / _CHECKPOINTS
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name != str(step):
            shutil.rmtree(entry)


def go_back_to_checkpoint(tuning: Path) -> int:
    """Leave of `tuning` what was there at its newest checkpoint; the number of steps behind it."""
    folder, losses = tuning / _CHECKPOINTS, tuning / LOSSES_FILE
    lines = losses.read_bytes().split(b"\n")[:-1] if losses.is_file() else []
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    done = max((int(name) for name in names if name.isdecimal()), default=0)
    if done > len(lines):
        done = 0  # the machine went down before the losses were on its disk
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
        problem = f"it has {len(losses)} steps of {record.recipe.steps}"
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
        raise UsageError(f"{output} holds no finished tuning of `assay bench tune`")
    return list(map(read_tuning, tunings))


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")
