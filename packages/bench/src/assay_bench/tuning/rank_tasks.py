"""Functions that the ranks of a tuning run: measure the model, train it, write the result."""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from assay.devices.registry import describe_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import LoadedModel, count_parameters, load_model, resolve_model
from assay.models.folders import local_folder
from assay.models.loading.tokenizing import load_tokenizer
from assay.models.saving import save_pretrained
from assay.models.size import choose_threads
from assay.runs import Progress
from assay.training.batches import MicroBatch, coder_of
from assay.training.overfit.memorization import LABELS, measure_memorization
from assay.training.processes.skipped_steps import step_until_made
from assay.training.protocol import StepReport, TrainingPlan
from assay.training.replay.conditions import comparable, keep_no_cache
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
    ModelStart,
    StepLoss,
    Trained,
    Tuned,
    TuneTask,
    checkpoint_folder,
    held_out_file,
    keep_only_checkpoint,
)
from assay_bench.tuning.rows import Source, draw_step, held_out_rows, read_sources

# Per source. With 128 tokens per row, the standard error of the mean is 0.06 nats per token for the standard
# library and 0.01 for sums. Rows are compared pairwise before and after training.
_HELD_OUT_ROWS = 32


def measure_start(task: TuneTask, _progress: Progress, rank: Rank) -> ModelStart:
    """Measure the model before training, on one rank. Raises: UsageError for an unknown trainer."""
    for permutation in task.recipe.permutations.values():
        require_trainer(permutation.trainer)
    sources = read_sources(task.recipe, Path(task.sources))
    for source in sources:
        path = held_out_file(task.folder, source.name)
        path.write_text(source.text.held_out, encoding="utf-8")
    loaded = _load(task.model, task, rank)
    return ModelStart(
        data_hash={source.name: source.text.hash for source in sources},
        weights_hash=loaded.weights_hash,
        held_out=_measure(loaded, sources, task, rank),
    )


def train(task: TuneTask, _progress: Progress, rank: Rank) -> Trained:
    """Train from the newest checkpoint, and write losses on rank 0."""
    recipe, way = task.recipe, task.way
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
    facts = describe_run(rank.device, run) | describe_trainer(
        way.trainer, plan, opened.trainer.model
    )
    if task.done:
        with opened.errors_in("load"):
            opened.trainer.load(checkpoint_folder(task.folder, task.done))
    sources, coder = read_sources(recipe, Path(task.sources)), coder_of(task.model)

    def batch_of(step: int) -> Sequence[MicroBatch]:
        return draw_step(sources, recipe, coder, seed=task.seed, step=step, ranks=way.ranks)

    with comparable(run.dtype, rank.device):
        _train_steps(opened, task, rank, batch_of)
    opened.trainer.teardown()
    return Trained(candidate=facts)


def _train_steps(
    opened: OpenedTrainer,
    task: TuneTask,
    rank: Rank,
    batch_of: Callable[[int], Sequence[MicroBatch]],
) -> None:
    recipe = task.recipe
    with (task.folder / LOSSES_FILE).open("a", encoding="utf-8") as losses:
        for step in range(task.done, recipe.steps):
            began, batch = time.perf_counter(), batch_of(step)

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


def write_model(task: TuneTask, _progress: Progress, rank: Rank) -> Tuned:
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
    loaded = _load(str(target), task, rank)
    sources = read_sources(task.recipe, Path(task.sources))
    return Tuned(weights_hash=loaded.weights_hash, held_out=_measure(loaded, sources, task, rank))


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


def _load(model: str, task: TuneTask, rank: Rank) -> LoadedModel:
    dtype = parse_run(task.recipe.run).dtype
    choose_threads(count_parameters(model))
    return load_model(model, dtype=dtype, device=rank.device.torch_device)


def _measure(
    loaded: LoadedModel, sources: Sequence[Source], task: TuneTask, rank: Rank
) -> dict[str, list[float]]:
    """Measure the nats per token of each held-out row, by source."""
    coder = coder_of(task.model)
    measured: dict[str, list[float]] = {}
    with rank.device.execution(), comparable(loaded.dtype, rank.device):
        for source in sources:
            rows = held_out_rows(source, task.recipe, coder, _HELD_OUT_ROWS)
            measured[source.name] = [_nats(loaded, row, rank) for row in rows]
    return measured


def _nats(loaded: LoadedModel, row: MicroBatch, rank: Rank) -> float:
    on_device = {name: tensor.to(rank.device.torch_device) for name, tensor in row.items()}
    return measure_memorization(loaded.model, [on_device]).nats[LABELS]
