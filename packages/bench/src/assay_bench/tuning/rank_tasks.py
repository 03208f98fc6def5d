"""Functions that the ranks of a tuning run: measure the model, train it, write the result.

The rows of a step depend only on seed and step, so a resumed run draws the same rows.

Shapes: B rows, T tokens.
"""

import os
import random
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from assay.devices.registry import describe_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import count_parameters, load_model, resolve_model
from assay.models.config_files import load_tokenizer
from assay.models.load import choose_threads
from assay.models.sources import local_folder
from assay.models.transformers_calls import save_pretrained
from assay.runs import Progress, Task
from assay.training.batches import TextCoder, coder_of
from assay.training.losses import IGNORED
from assay.training.overfit.sides import LABELS, measure_memorization
from assay.training.processes.free_run import step_until_made
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.replay.determinism import comparable, keep_no_cache
from assay.training.trainers.reference import MODEL_FOLDER as TRAINED_MODEL
from assay.training.trainers.registry import (
    OpenedTrainer,
    describe_trainer,
    open_trainer,
    require_trainer,
)
from assay_bench.tuning.records import (
    ADAPTER_FOLDER,
    LOSSES_FILE,
    MODEL_FOLDER,
    PART,
    Measured,
    ModelStart,
    StepLoss,
    Text,
    TuneTask,
    TuningRecipe,
    checkpoint_folder,
    keep_only_checkpoint,
    read_training_text,
)

# Common tokenizers have about 4 characters of English per token, and more for spaces.
_CHARACTERS_PER_TOKEN = 8


def read_texts(recipe: TuningRecipe, folder: Path) -> dict[str, Text]:
    """Read the text of each source of a recipe. folder: folder of relative paths. Raises: UsageError."""
    return {source: read_training_text(source, folder) for source in recipe.shares}


def draw_step(
    texts: Mapping[str, Text],
    recipe: TuningRecipe,
    coder: TextCoder,
    *,
    seed: int,
    step: int,
    ranks: int,
) -> list[MicroBatch]:
    """Draw the micro-batches of a step, one per rank. All together have the same rows for any `ranks`."""
    rng = random.Random(f"{seed}/{step}")  # noqa: S311 - reproducible
    rows = [
        _draw(texts[source].training, coder, recipe.sequence_length, rng)
        for source in _choose_sources(recipe)
    ]
    return [_pad(rows[rank::ranks], coder.pad_token_id) for rank in range(ranks)]


def held_out_rows(text: Text, recipe: TuningRecipe, coder: TextCoder) -> list[MicroBatch]:
    """Draw held-out rows, one per micro-batch, the same for all seeds."""
    rng = random.Random("held out")  # noqa: S311 - reproducible
    rows = [
        _draw(text.held_out, coder, recipe.sequence_length, rng)
        for _ in range(recipe.held_out_rows)
    ]
    return [_pad([row], coder.pad_token_id) for row in rows]


def _choose_sources(recipe: TuningRecipe) -> list[str]:
    """Return the source of each row of a step, in proportion to the shares.

    Rows of one source are adjacent, so that every rank's stride gets its part of each source.
    """
    shares = recipe.shares
    counts = dict.fromkeys(shares, 0)
    for row in range(1, recipe.batch_size + 1):
        behind = max(shares, key=lambda source: shares[source] * row - counts[source])
        counts[behind] += 1
    return [source for source, count in counts.items() for _ in range(count)]


def _draw(text: str, coder: TextCoder, length: int, rng: random.Random) -> list[int]:
    """Return `length` token ids from the start of a line; fewer if the text is too short."""
    start = text.find("\n", rng.randrange(len(text))) + 1
    wanted = length * _CHARACTERS_PER_TOKEN
    piece = text[start : start + wanted]
    if len(piece) < wanted:
        piece += text[: wanted - len(piece)]
    return coder.encode(piece)[:length]


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> MicroBatch:
    """Make tensors (B, T), padded on the right."""
    ids = [torch.tensor(row) for row in rows]
    pad = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": pad(ids, padding_value=pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in ids]),
        "labels": pad(ids, padding_value=IGNORED),
    }


def measure_start(task: TuneTask, _progress: Progress, rank: Rank) -> ModelStart:
    """Measure the model before training, on one rank. Raises: UsageError for an unknown trainer."""
    for permutation in task.recipe.permutations.values():
        require_trainer(permutation.trainer)
    texts = read_texts(task.recipe, task.sources)
    measured = _measure(task.model, texts, task, rank)
    return ModelStart(
        data_hash={source: text.hash for source, text in texts.items()},
        weights_hash=measured.weights_hash,
        held_out=measured.held_out,
    )


def train(task: TuneTask, progress: Progress, rank: Rank) -> dict[str, Any]:
    """Train from the newest checkpoint, and write losses on rank 0. Returns: facts of the candidate."""
    recipe, way = task.recipe, task.way
    with progress.task(f"tuning {task.title}", recipe.steps, "steps") as bar:
        bar.advance(task.done)
        choose_threads(count_parameters(task.model))
        run = parse_run(recipe.run)
        plan = TrainingPlan(
            model=task.model,
            run=f"{rank.device.name}/{run.dtype}",
            steps=recipe.steps,
            micro_batches=way.ranks,
            seed=task.seed,
            learning_rate=way.learning_rate,
            mesh=dict(rank.axes),
            features=frozenset(way.features),
            # Dropout depends on the number of ranks, which would make curves incomparable.
            adapter_dropout=0.0,
        )
        opened = open_trainer(way.trainer, plan)
        keep_no_cache(opened.trainer.model)
        facts = describe_run(rank.device, run)
        facts |= describe_trainer(way.trainer, plan, opened.trainer.model)
        if task.done:
            with opened.errors_in("load"):
                opened.trainer.load(checkpoint_folder(task.folder, task.done))
        with comparable(run.dtype, rank.device):
            _train_steps(opened, task, rank, bar)
        opened.trainer.teardown()
    return facts


def _train_steps(opened: OpenedTrainer, task: TuneTask, rank: Rank, bar: Task) -> None:
    recipe = task.recipe
    texts, coder = read_texts(recipe, task.sources), coder_of(task.model)
    with (task.folder / LOSSES_FILE).open("a", encoding="utf-8") as losses:
        for step in range(task.done, recipe.steps):
            began = time.perf_counter()
            batch = draw_step(texts, recipe, coder, seed=task.seed, step=step, ranks=task.way.ranks)

            def make_step(batch: Sequence[MicroBatch] = batch) -> StepReport:
                with opened.errors_in("step"):
                    return opened.trainer.step(batch)

            report, _ = step_until_made(make_step, lambda: None)
            line = StepLoss(
                step=step,
                loss=report.loss,
                learning_rate=report.learning_rate,
                tokens=report.num_tokens,
                seconds=time.perf_counter() - began,
            )
            if rank.number == 0:
                losses.write(line.model_dump_json() + "\n")
                losses.flush()
            bar.advance()
            num_done = step + 1
            if num_done % recipe.checkpoint_every == 0 or num_done == recipe.steps:
                os.fsync(losses.fileno())
                _save(opened, task.folder, rank, num_done)


def _save(opened: OpenedTrainer, folder: Path, rank: Rank, num_done: int) -> None:
    part = checkpoint_folder(folder, PART)
    with opened.errors_in("save"):
        opened.trainer.save(part)
    if rank.size > 1:
        dist.barrier()
    if rank.number == 0:
        part.rename(checkpoint_folder(folder, num_done))
        keep_only_checkpoint(folder, num_done)


def write_model(task: TuneTask, _progress: Progress, rank: Rank) -> Measured:
    """Write the trained model as a Hugging Face folder, read it back and measure it, on one rank."""
    trained = checkpoint_folder(task.folder, task.recipe.steps) / TRAINED_MODEL
    target = task.folder / MODEL_FOLDER
    for stale in (target, task.folder / ADAPTER_FOLDER):
        shutil.rmtree(stale, ignore_errors=True)
    if "lora" in task.way.features:
        shutil.copytree(trained, task.folder / ADAPTER_FOLDER)
        _write_merged(task, trained, target)
    else:
        shutil.copytree(trained, target)
    with local_folder(resolve_model(task.model), "refuse") as source:
        if (source / "tokenizer_config.json").is_file():
            load_tokenizer(source, "refuse").save_pretrained(target)
    return _measure(str(target), read_texts(task.recipe, task.sources), task, rank)


def _write_merged(task: TuneTask, adapter: Path, target: Path) -> None:
    """Merge the adapter into the weights in float32, and write them in the run's dtype."""
    from peft import PeftModel

    base: Any = load_model(task.model, dtype="float32").model
    with warnings.catch_warnings():
        # peft 0.21 uses an attribute that transformers 5.23 renamed.
        warnings.simplefilter("ignore", FutureWarning)
        merged: Any = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    dtype = parse_run(task.recipe.run).dtype
    save_pretrained(merged.to(getattr(torch, dtype)), target)


def _measure(model: str, texts: Mapping[str, Text], task: TuneTask, rank: Rank) -> Measured:
    """Load `model`, and measure the nats per token of each held-out row."""
    choose_threads(count_parameters(model))
    device = rank.device
    dtype = parse_run(task.recipe.run).dtype
    loaded = load_model(model, dtype=dtype, device=device.torch_device)
    coder = coder_of(task.model)

    def nats_of(row: MicroBatch) -> float:
        on_device = {name: tensor.to(device.torch_device) for name, tensor in row.items()}
        return measure_memorization(loaded.model, [on_device]).nats[LABELS]

    with device.execution(), comparable(loaded.dtype, device):
        held_out = {
            source: list(map(nats_of, held_out_rows(text, task.recipe, coder)))
            for source, text in texts.items()
        }
    return Measured(weights_hash=loaded.weights_hash, held_out=held_out)
